//! What collectives compute.

use std::ops::Range;

use oxizero_comm::{Communicator, ReduceScatter, ReduceTarget, Traffic, redistribute};
use oxizero_core::{Bytes, DType, Numel, Placement, ProcessGroup, Rank};
use oxizero_device::Buffer;
use oxizero_device::kernels::Combine;

use crate::data::{Place, SHARDS, buffer, fill, rounded, tree, value, values};

const PLACES: [Place; 2] = [Place::Alloc, Place::Heap];

pub(crate) fn sums_equal_a_plain_loop(comm: Box<dyn Communicator>) {
    for (seed, shard) in SHARDS.into_iter().enumerate() {
        for wire in DType::ALL {
            for place in PLACES {
                in_place(&*comm, wire, shard, seed, place);
                on_all(&*comm, wire, shard, seed, place);
                for out in DType::ALL {
                    into_shard(&*comm, (wire, out), shard, seed, Combine::Assign, place);
                    into_shard(&*comm, (wire, out), shard, seed, Combine::Add, place);
                    into_shard_of(&*comm, (wire, out), shard, seed, place);
                }
            }
        }
    }
}

/// This rank's contribution.
fn partial(comm: &dyn Communicator, wire: DType, shard: usize, seed: usize, at: Place) -> Buffer {
    let numel = shard * comm.world_size().get();
    let mut partial = buffer(comm, at, numel, wire);
    fill(&mut partial, 0..numel, |index| value(comm.rank().0, index, seed));
    partial
}

/// Elements of the sum of all contributions, before they are rounded.
fn sums_of(
    comm: &dyn Communicator,
    wire: DType,
    elements: Range<usize>,
    seed: usize,
) -> impl Iterator<Item = f32> {
    let ranks = 0..comm.world_size().get();
    elements.map(move |index| {
        tree(ranks.clone().map(|rank| rounded(value(rank, index, seed), wire)).collect())
    })
}

/// This rank's shard of them.
fn sums(comm: &dyn Communicator, wire: DType, shard: usize, seed: usize) -> Vec<f32> {
    let start = comm.rank().0 * shard;
    sums_of(comm, wire, start..start + shard, seed).collect()
}

fn reduce(comm: &dyn Communicator, partial: Buffer, target: ReduceTarget) -> ReduceScatter {
    comm.reduce_scatter(ReduceScatter { partial, target }).unwrap().wait().unwrap()
}

fn in_place(comm: &dyn Communicator, wire: DType, shard: usize, seed: usize, place: Place) {
    let mine = comm.rank().0 * shard..(comm.rank().0 + 1) * shard;
    let before = partial(comm, wire, shard, seed, place);
    let mut expected = values(&before);
    let sum = sums(comm, wire, shard, seed);
    expected[mine].copy_from_slice(&sum.iter().map(|x| rounded(*x, wire)).collect::<Vec<_>>());
    let after = reduce(comm, before, ReduceTarget::InPlace);
    assert_eq!(values(&after.partial), expected, "{wire}, {shard} a shard");
}

/// The sum comes to every rank, also where only some ranks' memory can be written by others.
fn on_all(comm: &dyn Communicator, wire: DType, shard: usize, seed: usize, place: Place) {
    let place = if comm.rank().0.is_multiple_of(2) { Place::Alloc } else { place };
    let before = partial(comm, wire, shard, seed, place);
    let sums = sums_of(comm, wire, 0..before.numel().0, seed);
    let expected: Vec<_> = sums.map(|sum| rounded(sum, wire)).collect();
    let after = comm.all_reduce(before).unwrap().wait().unwrap();
    assert_eq!(values(&after), expected, "{wire}, {shard} a shard");
}

fn into_shard(
    comm: &dyn Communicator,
    (wire, out): (DType, DType),
    shard: usize,
    seed: usize,
    combine: Combine,
    place: Place,
) {
    let mut target = buffer(comm, place, shard, out);
    fill(&mut target, 0..shard, |index| value(9, index, seed));
    let before = match combine {
        Combine::Assign => vec![0.0; shard],
        Combine::Add => values(&target),
    };
    let sum = sums(comm, wire, shard, seed);
    let expected: Vec<_> = before.iter().zip(&sum).map(|(x, y)| rounded(x + y, out)).collect();
    let target = ReduceTarget::Shard(target, combine);
    let after = reduce(comm, partial(comm, wire, shard, seed, place), target);
    let ReduceTarget::Shard(after, _) = after.target else { panic!("another target came back") };
    assert_eq!(values(&after), expected, "{wire} to {out}, {shard} a shard, {combine:?}");
}

fn into_shard_of(
    comm: &dyn Communicator,
    (wire, out): (DType, DType),
    shard: usize,
    seed: usize,
    place: Place,
) {
    let numel = shard * comm.world_size().get();
    let mut target = buffer(comm, place, numel, out);
    fill(&mut target, 0..numel, |_| 3.0);
    let mut expected = vec![3.0; numel];
    for (index, sum) in sums(comm, wire, shard, seed).into_iter().enumerate() {
        expected[comm.rank().0 * shard + index] = rounded(sum, out);
    }
    let partial = partial(comm, wire, shard, seed, place);
    let after = reduce(comm, partial, ReduceTarget::ShardOf(target));
    let ReduceTarget::ShardOf(after) = after.target else { panic!("another target came back") };
    assert_eq!(values(&after), expected, "{wire} to {out}, {shard} a shard");
}

/// Every rank ends with the whole sum, wherever it was put.
pub(crate) fn partial_sums_become_replicated(comm: Box<dyn Communicator>) {
    let world_size = comm.world_size().get();
    let shard = 40_007;
    let numel = shard * world_size;
    let expected: Vec<_> = sums_of(&*comm, DType::F32, 0..numel, 1).collect();
    let partial = || partial(&*comm, DType::F32, shard, 1, Place::Alloc);
    let op = ReduceScatter { partial: partial(), target: ReduceTarget::InPlace };
    let after = redistribute(&*comm, op, Placement::Replicated).unwrap();
    assert_eq!(after.partial.f32(), expected);

    let target = ReduceTarget::ShardOf(buffer(&*comm, Place::Heap, numel, DType::Bf16));
    let op = ReduceScatter { partial: partial(), target };
    let after = redistribute(&*comm, op, Placement::Replicated).unwrap();
    let ReduceTarget::ShardOf(sum) = after.target else { panic!("another target came back") };
    let expected: Vec<_> = expected.into_iter().map(|sum| rounded(sum, DType::Bf16)).collect();
    assert_eq!(values(&sum), expected);

    let op = ReduceScatter { partial: partial(), target: ReduceTarget::InPlace };
    let before = values(&op.partial);
    let after = redistribute(&*comm, op, Placement::Partial).unwrap();
    assert_eq!(values(&after.partial), before);
}

/// One after the other, four ranks would give 1: 1e8 + 1 is 1e8 in f32.
pub(crate) fn sums_are_trees_in_rank_order(comm: Box<dyn Communicator>) {
    let terms = [1e8, 1.0, -1e8, 1.0, 5.0];
    let sums = [1e8, 1e8, 0.0, 0.0, 5.0];
    let world_size = comm.world_size().get();
    let mut partial = buffer(&*comm, Place::Alloc, world_size, DType::F32);
    fill(&mut partial, 0..world_size, |_| terms[comm.rank().0]);
    let after = reduce(&*comm, partial, ReduceTarget::InPlace).partial;
    assert_eq!(after.f32()[comm.rank().0], sums[world_size - 1]);
}

pub(crate) fn gathers_complete_every_buffer(comm: Box<dyn Communicator>) {
    let world_size = comm.world_size().get();
    for (seed, shard) in SHARDS.into_iter().enumerate() {
        for dtype in DType::ALL {
            for place in PLACES {
                let mine = comm.rank().0 * shard..(comm.rank().0 + 1) * shard;
                let expected: Vec<_> = (0..world_size * shard)
                    .map(|index| rounded(value(index / shard, index, seed), dtype))
                    .collect();

                let mut full = buffer(&*comm, place, world_size * shard, dtype);
                fill(&mut full, mine.clone(), |index| value(comm.rank().0, index, seed));
                let full = comm.all_gather(full).unwrap().wait().unwrap();
                assert_eq!(values(&full), expected, "{dtype}, {shard} a shard, {place:?}");

                let mut own = buffer(&*comm, place, shard, dtype);
                let first = mine.start;
                fill(&mut own, 0..shard, |index| value(comm.rank().0, first + index, seed));
                let full = buffer(&*comm, place, world_size * shard, dtype);
                let (own, full) = comm.all_gather_into(own, full).unwrap().wait().unwrap();
                assert_eq!(values(&own), expected[mine]);
                assert_eq!(values(&full), expected, "{dtype}, {shard} a shard, {place:?}");
            }
        }
    }
}

/// Each rank writes its shard only; the gather is right whether the memory is one or many.
pub(crate) fn replicas_hold_every_shard(comm: Box<dyn Communicator>) {
    let world_size = comm.world_size().get();
    for shard in [1, 16, 9001] {
        let numel = Numel(world_size * shard);
        let region = comm.alloc_replica(numel.bytes(DType::F32)).unwrap();
        let mut full = Buffer::new(region, DType::F32);
        for round in 0..3 {
            comm.barrier().unwrap();
            let mine = comm.rank().0 * shard..(comm.rank().0 + 1) * shard;
            fill(&mut full, mine, |index| (index + round) as f32);
            full = comm.all_gather(full).unwrap().wait().unwrap();
            let expected: Vec<_> = (0..numel.0).map(|index| (index + round) as f32).collect();
            assert_eq!(full.f32(), expected);
        }
    }
}

pub(crate) fn broadcasts_come_from_each_root(comm: Box<dyn Communicator>) {
    for root in comm.world_size().ranks() {
        for (seed, numel) in SHARDS.into_iter().enumerate() {
            for dtype in DType::ALL {
                for place in PLACES {
                    let mut sent = buffer(&*comm, place, numel, dtype);
                    fill(&mut sent, 0..numel, |index| value(comm.rank().0, index, seed));
                    let got = comm.broadcast(sent, root).unwrap().wait().unwrap();
                    let expected = (0..numel).map(|i| rounded(value(root.0, i, seed), dtype));
                    assert_eq!(values(&got), expected.collect::<Vec<_>>());
                }
            }
        }
        let mut replica = Buffer::new(comm.alloc_replica(Bytes(40)).unwrap(), DType::F32);
        if comm.rank() == root {
            fill(&mut replica, 0..10, |index| index as f32);
        }
        let replica = comm.broadcast(replica, root).unwrap().wait().unwrap();
        assert_eq!(replica.f32(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].map(|i| i as f32));
    }
}

pub(crate) fn exchanges_are_in_rank_order(comm: Box<dyn Communicator>) {
    for len in [0, 1, 3, 1000] {
        comm.barrier().unwrap();
        let all = comm.exchange("a test", &vec![comm.rank().0 as u8 + 1; len]).unwrap();
        let expected: Vec<_> =
            comm.world_size().ranks().map(|r| vec![r.0 as u8 + 1; len]).collect();
        assert_eq!(all, expected);
    }
}

pub(crate) fn traffic_is_counted(comm: Box<dyn Communicator>) {
    let world_size = comm.world_size().get();
    let others = world_size - 1;
    let since = |before: Traffic| {
        let Traffic { collectives, bytes, exchanges } = comm.traffic() - before;
        (collectives, bytes.0, exchanges)
    };
    let full = |dtype| Buffer::heap(Numel(10 * world_size), dtype);

    let start = comm.traffic();
    assert_eq!(start, Traffic::default());
    reduce(&*comm, full(DType::Bf16), ReduceTarget::InPlace);
    assert_eq!(since(start), (1, 20 * others, 0));

    let start = comm.traffic();
    comm.all_gather(full(DType::F32)).unwrap().wait().unwrap();
    comm.broadcast(full(DType::F32), Rank(0)).unwrap().wait().unwrap();
    let read = if comm.rank() == Rank(0) { 0 } else { 40 * world_size };
    assert_eq!(since(start), (2, 40 * others + read, 0));

    let start = comm.traffic();
    comm.exchange("a test", b"verdict").unwrap();
    comm.barrier().unwrap();
    assert_eq!(since(start), (0, 0, 2));

    let mut replica = Buffer::new(comm.alloc_replica(Bytes(8 * world_size)).unwrap(), DType::F32);
    let start = comm.traffic();
    replica = comm.all_gather(replica).unwrap().wait().unwrap();
    let read = if comm.shares_replicas() { 0 } else { 8 * others };
    assert_eq!(since(start), (1, read, 0));
    drop(replica);
}

/// Even and odd ranks sum at the same time, in groups of their own, and the world goes on.
pub(crate) fn groups_work_apart(comm: Box<dyn Communicator>) {
    let parity = comm.rank().0 % 2;
    let members: Vec<_> = comm.world_size().ranks().filter(|rank| rank.0 % 2 == parity).collect();
    let group = ProcessGroup::new(members.clone()).unwrap();
    for round in 0..3 {
        let half = comm.split(&group).unwrap();
        assert_eq!(half.rank(), group.rank_of(comm.rank()).unwrap());
        assert_eq!(half.world_size(), group.size());
        let expected: Vec<_> = members.iter().map(|rank| vec![rank.0 as u8, round]).collect();
        assert_eq!(half.exchange("a test", &[comm.rank().0 as u8, round]).unwrap(), expected);

        let pair = ProcessGroup::new(vec![members[0], *members.last().unwrap()]);
        if let Some(pair) = pair.filter(|pair| pair.rank_of(comm.rank()).is_some()) {
            let pair = half.split(&pair).unwrap();
            let replica = pair.alloc_replica(Bytes(64)).unwrap();
            pair.barrier().unwrap();
            assert_eq!(replica.bytes(), [0; 64]);
        }
        assert_eq!(comm.exchange("a test", &[round]).unwrap().len(), comm.world_size().get());
    }
}

pub(crate) fn memory_is_zeroed_whenever_it_is_handed_out(comm: Box<dyn Communicator>) {
    for bytes in [1, 64, 4096, 100_000, 1 << 20, (3 << 20) + 5] {
        for round in 0..3 {
            let mut first = comm.alloc(Bytes(bytes)).unwrap();
            let mut second = comm.alloc(Bytes(bytes + round)).unwrap();
            let mut replica = comm.alloc_replica(Bytes(bytes * comm.world_size().get())).unwrap();
            assert!(first.bytes().iter().all(|byte| *byte == 0));
            assert!(second.bytes().iter().all(|byte| *byte == 0));
            assert!(replica.bytes().iter().all(|byte| *byte == 0));
            comm.barrier().unwrap();
            first.bytes_mut().fill(1);
            second.bytes_mut().fill(2);
            let mine = comm.rank().0 * bytes..(comm.rank().0 + 1) * bytes;
            replica.range_mut(mine).fill(3);
            assert!(first.bytes().iter().all(|byte| *byte == 1));
            comm.alloc_scratch(Bytes(bytes)).unwrap().bytes_mut().fill(4);
        }
    }
}
