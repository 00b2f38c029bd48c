//! Many groups of one world at once, as those of a mesh's axes.

use oxizero_comm::{CommError, Communicator, ReduceScatter, ReduceTarget};
use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank};
use oxizero_device::Buffer;

/// Axes for every world of the tests; the last axis is the fastest.
const MESHES: [[usize; 3]; 5] = [[1, 1, 1], [1, 2, 1], [3, 1, 1], [2, 1, 2], [1, 5, 1]];

/// Of each set of axes, none included, the ranks that differ from `rank` in these alone.
fn groups(rank: usize, axes: [usize; 3]) -> Vec<ProcessGroup> {
    let place =
        |rank: usize| [rank / (axes[1] * axes[2]), rank / axes[2] % axes[1], rank % axes[2]];
    let group = |set: usize| {
        let differs_there_alone = |other: &usize| {
            let places = place(rank).into_iter().zip(place(*other)).enumerate();
            places.into_iter().all(|(axis, (one, other))| set >> axis & 1 == 1 || one == other)
        };
        let ranks = (0..axes.iter().product()).filter(differs_there_alone).map(Rank);
        ProcessGroup::new(ranks.collect()).unwrap()
    };
    (0..8).map(group).collect()
}

pub(crate) fn all_groups_of_a_mesh_work_at_once(comm: Box<dyn Communicator>) {
    let axes = MESHES[comm.world_size().get() - 1];
    let groups = groups(comm.rank().0, axes);
    let open: Vec<_> = groups.iter().map(|group| comm.split(group).unwrap()).collect();
    let replicas: Vec<_> =
        open.iter().map(|group| group.alloc_replica(Bytes(64)).unwrap()).collect();
    for round in 0..24 {
        for index in (0..8).map(|index| index * 3 + round) {
            let index = index % 8;
            sum(&*open[index], &groups[index], comm.rank(), round);
        }
        let told = open[round % 8].exchange("a test", &[comm.rank().0 as u8]).unwrap();
        let members = groups[round % 8].ranks().iter();
        assert_eq!(told, members.map(|rank| vec![rank.0 as u8]).collect::<Vec<_>>());
        comm.barrier().unwrap();
    }
    assert!(replicas.iter().all(|replica| replica.bytes() == [0; 64]));
}

/// Every rank ends with the sum of what the group's ranks give.
fn sum(comm: &dyn Communicator, group: &ProcessGroup, rank: Rank, round: usize) {
    let numel = 6 * group.size().get();
    let given = |rank: Rank| (1 + rank.0 * 100 + round) as f32;
    let mut partial = Buffer::heap(Numel(numel), DType::F32);
    partial.f32_mut(0..numel).fill(given(rank));
    let op = ReduceScatter { partial, target: ReduceTarget::InPlace };
    let partial = comm.reduce_scatter(op).unwrap().wait().unwrap().partial;
    let full = comm.all_gather(partial).unwrap().wait().unwrap();
    let expected: f32 = group.ranks().iter().map(|rank| given(*rank)).sum();
    assert_eq!(full.f32(), vec![expected; numel]);
}

/// More than there are places to meet.
pub(crate) fn groups_of_one_rank_are_without_number(comm: Box<dyn Communicator>) {
    let alone = ProcessGroup::new(vec![comm.rank()]).unwrap();
    let open: Vec<_> = (0..300).map(|_| comm.split(&alone).unwrap()).collect();
    for group in &open {
        sum(&**group, &alone, comm.rank(), 0);
        assert_eq!(group.exchange("a test", &[7]).unwrap(), [[7]]);
        let full = group.broadcast(Buffer::heap(Numel(3), DType::Bf16), Rank(0)).unwrap();
        assert_eq!(full.wait().unwrap().numel(), Numel(3));
    }
    comm.barrier().unwrap();
}

/// Waits for `ended`, who never comes, or for somebody who waits so, each in a group of two.
pub(crate) fn wait_in_pairs_until(comm: &dyn Communicator, ended: Rank, ready: impl Fn()) {
    let (me, ranks) = (comm.rank().0, comm.world_size().get());
    let pair = |first: usize| ProcessGroup::new(vec![Rank(first), Rank(first + 1)]).unwrap();
    let firsts = me.saturating_sub(1)..(me + 1).min(ranks - 1);
    let pairs: Vec<_> = firsts.map(|first| (first, comm.split(&pair(first)).unwrap())).collect();
    comm.barrier().unwrap();
    ready();
    if comm.rank() == ended {
        return;
    }
    let towards = if me < ended.0 { me } else { me - 1 };
    let (_, pair) = pairs.iter().find(|(first, _)| *first == towards).unwrap();
    for result in [pair.barrier(), pair.barrier(), comm.barrier()] {
        assert!(matches!(result, Err(CommError::PeerDead { rank, .. }) if rank == ended));
    }
}

/// Some wait for the rank that leaves, the others for those who wait, in other groups.
pub(crate) fn a_rank_that_leaves_one_group_ends_all_who_wait(comm: Box<dyn Communicator>) {
    let last = Rank(comm.world_size().get() - 1);
    wait_in_pairs_until(&*comm, last, || {});
}

/// The first two ranks disagree in a group of theirs, and stay; the others wait in another group,
/// or with them.
pub(crate) fn a_mismatch_in_one_group_ends_the_others(comm: Box<dyn Communicator>) {
    let (me, ranks) = (comm.rank().0, comm.world_size().get());
    if ranks < 3 {
        return;
    }
    let members = if me < 2 { 0..2 } else { 2..ranks };
    let group = comm.split(&ProcessGroup::new(members.map(Rank).collect()).unwrap()).unwrap();
    comm.barrier().unwrap();
    if me < 2 {
        let result =
            if me == 0 { group.barrier() } else { group.exchange("a test", &[1]).map(drop) };
        assert!(matches!(result, Err(CommError::Mismatch { .. })), "{result:?}");
    }
    let result = if me == 2 && ranks > 3 { group.barrier() } else { comm.barrier() };
    match result {
        Err(CommError::Aborted { rank, why }) => {
            assert!(rank.0 < 2 && why.contains("ranks disagree on operation 2"), "{rank}: {why}");
        }
        result => panic!("{result:?} instead of an abort"),
    }
}
