//! Views of all ranks' shards.

use std::time::Duration;

use oxizero_comm::{CommError, Communicator, OwnShard};
use oxizero_core::{DType, Numel, Rank};
use oxizero_device::{Buffer, kernels};

use crate::DEADLINE;
use crate::data::{Place, rounded, value, values};
use crate::many::{LENGTHS, Lengths, shards_in};
use crate::processes::World;

pub(crate) fn every_rank_views_all_shards(comm: Box<dyn Communicator>) {
    for (count, lengths) in [0, 1, 3, 20].iter().flat_map(|n| LENGTHS.map(|l| (*n, l))) {
        for dtype in DType::ALL {
            view(&*comm, count, lengths, dtype);
        }
    }
}

fn view(comm: &dyn Communicator, count: usize, lengths: Lengths, dtype: DType) {
    let ranks = comm.world_size();
    let size = |rank: Rank, index| lengths(index, rank.0, ranks.get());
    let sizes: Vec<usize> = (0..count).map(|index| size(comm.rank(), index)).collect();
    let shards = shards_in(comm, &sizes, (dtype, count), |_| Place::Alloc);
    let before: Vec<_> = shards.iter().map(|shard| values(&shard.buffer)).collect();
    let start = comm.traffic();
    let views = comm.peer_views(shards, dtype).unwrap();
    assert_eq!((comm.traffic() - start).collectives, 1);
    for (rank, index) in ranks.ranks().flat_map(|rank| (0..count).map(move |i| (rank, i))) {
        let value = |i| rounded(value(rank.0, i + 100 * index, count), dtype);
        let expected: Vec<_> = (0..size(rank, index)).map(value).collect();
        let got = Buffer::copy_of(views.get(rank, index));
        assert_eq!(values(&got), expected, "{dtype}, shard {index} of rank {rank}");
    }
    let shards = comm.end_peer_views(views).unwrap();
    let after: Vec<_> = shards.iter().map(|shard| values(&shard.buffer)).collect();
    assert_eq!(after, before);
}

pub(crate) fn shards_that_cannot_be_viewed_are_refused(comm: Box<dyn Communicator>) {
    let shard = || OwnShard { buffer: Buffer::heap(Numel(3), DType::F32), own: 0..3 };
    let error = comm.peer_views(vec![shard()], DType::Bf16).unwrap_err();
    assert!(matches!(error, CommError::Misuse { .. }), "{error}");
    match comm.peer_views(vec![shard()], DType::F32) {
        Ok(views) => assert!(views.is_copy() && comm.end_peer_views(views).is_ok()),
        Err(error) => assert!(error.to_string().contains("memory of alloc()"), "{error}"),
    }
    comm.barrier().unwrap();
}

/// One element a rank, its number; not a copy.
fn viewed(comm: &dyn Communicator) -> oxizero_comm::PeerViews {
    let mut buffer = Buffer::new(comm.alloc(Numel(1).bytes(DType::F32)).unwrap(), DType::F32);
    kernels::fill(buffer.view_mut(), comm.rank().0 as f32);
    let views = comm.peer_views(vec![OwnShard { buffer, own: 0..1 }], DType::F32).unwrap();
    assert!(!views.is_copy());
    views
}

/// Rank 0 reads late. Meanwhile the group does other things, and the others wait to write.
pub(crate) fn wait_for_a_reader(comm: Box<dyn Communicator>) {
    for _ in 0..20 {
        let views = viewed(&*comm);
        comm.barrier().unwrap();
        if comm.rank() == Rank(0) {
            std::thread::sleep(Duration::from_millis(5));
        }
        for rank in comm.world_size().ranks() {
            assert_eq!(values(&Buffer::copy_of(views.get(rank, 0))), [rank.0 as f32]);
        }
        for mut shard in comm.end_peer_views(views).unwrap() {
            kernels::fill(shard.buffer.view_mut(), 9.0);
        }
    }
}

pub(crate) fn time_out_on_a_reader(comm: Box<dyn Communicator>) {
    let views = viewed(&*comm);
    if comm.rank() == Rank(1) {
        std::thread::sleep(Duration::from_millis(1200));
        assert_eq!(values(&Buffer::copy_of(views.get(Rank(0), 0))), [0.0]);
    }
    match comm.end_peer_views(views).unwrap_err() {
        CommError::Timeout { rank: Rank(1), during, .. } => assert_eq!(during, "end of views"),
        error => panic!("{error}"),
    }
}

pub(crate) fn drop_what_others_read(comm: Box<dyn Communicator>) {
    let views = viewed(&*comm);
    if comm.rank() == Rank(1) {
        return drop(views);
    }
    match comm.end_peer_views(views).unwrap_err() {
        CommError::Aborted { rank: Rank(1), why } => assert!(why.contains("lent"), "{why}"),
        error => panic!("{error}"),
    }
}

#[test]
fn what_is_viewed_is_written_when_nobody_reads_any_more() {
    World::start("wait_for_a_reader", 3, DEADLINE).finish(None);
}

#[test]
fn who_does_not_end_its_views_is_named() {
    World::start("time_out_on_a_reader", 3, Duration::from_millis(400)).finish(None);
}

#[test]
fn who_drops_what_others_view_fails_them() {
    World::start("drop_what_others_read", 3, DEADLINE).finish(None);
}
