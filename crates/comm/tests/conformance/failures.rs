//! How collectives fail: on every rank, at once, naming who and what.

use std::time::{Duration, Instant};

use oxizero_comm::{CommError, Communicator, OwnShard, ReduceScatter, ReduceTarget};
use oxizero_core::{DType, Numel, ProcessGroup, Rank};
use oxizero_device::Buffer;
use oxizero_device::kernels::Combine;

/// One way to call, and the words for it in the error.
type Call = (fn(&dyn Communicator) -> Result<(), CommError>, &'static str);

fn full(comm: &dyn Communicator, shard: usize, dtype: DType) -> Buffer {
    Buffer::heap(Numel(shard * comm.world_size().get()), dtype)
}

fn gather_many(comm: &dyn Communicator, count: usize) -> Result<(), CommError> {
    let buffer = || Buffer::heap(Numel(6 / count), DType::F32);
    let shard = |_| OwnShard { buffer: buffer(), own: 0..6 / count };
    comm.all_gather_many((0..count).map(shard).collect(), full(comm, 6, DType::F32))?
        .wait()
        .map(drop)
}

const CALLS: [Call; 11] = [
    (|comm| comm.barrier(), "barrier"),
    (|comm| comm.exchange("a test", &[0; 3]).map(drop), "exchange of 3 bytes for a test"),
    (|comm| comm.exchange("a test", &[0; 4]).map(drop), "exchange of 4 bytes for a test"),
    (|comm| comm.all_gather(full(comm, 2, DType::F32))?.wait().map(drop), "all-gather of"),
    (|comm| comm.all_gather(full(comm, 2, DType::F16))?.wait().map(drop), "f16"),
    (|comm| comm.broadcast(full(comm, 2, DType::F32), Rank(0))?.wait().map(drop), "from rank 0"),
    (|comm| comm.broadcast(full(comm, 2, DType::F32), Rank(1))?.wait().map(drop), "from rank 1"),
    (|comm| comm.alloc_replica(Numel(2).bytes(DType::F32)).map(drop), "replica of 8 bytes"),
    (
        |comm| {
            let partial = full(comm, 3, DType::Bf16);
            let op = ReduceScatter { partial, target: ReduceTarget::InPlace };
            comm.reduce_scatter(op)?.wait().map(drop)
        },
        "reduce-scatter of",
    ),
    (|comm| gather_many(comm, 2), "all-gather from 2 shards"),
    (|comm| gather_many(comm, 3), "all-gather from 3 shards"),
];

/// In a group of its own each time, the last rank calls one thing and the others another.
pub(crate) fn mismatches_name_both_sides(comm: Box<dyn Communicator>) {
    let last = Rank(comm.world_size().get() - 1);
    if last == Rank(0) {
        return;
    }
    let world = ProcessGroup::world(comm.world_size());
    for (index, ours) in CALLS.iter().enumerate() {
        let theirs = &CALLS[(index + 1) % CALLS.len()];
        let group = comm.split(&world).unwrap();
        group.barrier().unwrap();
        let (mine, other) = if comm.rank() == last { (theirs, ours) } else { (ours, theirs) };
        match mine.0(&*group) {
            Err(CommError::Mismatch { rank, expected, other: who, got, .. }) => {
                assert_eq!(rank, comm.rank());
                assert_eq!(who, if comm.rank() == last { Rank(0) } else { last });
                assert!(expected.contains(mine.1), "{expected} for {}", mine.1);
                assert!(got.contains(other.1), "{got} for {}", other.1);
            }
            result => panic!("{result:?} instead of a mismatch"),
        }
        let again = group.barrier();
        assert!(matches!(again, Err(CommError::Mismatch { .. })), "{again:?}: it is not final");
    }
    comm.barrier().unwrap();
}

pub(crate) fn misuse_is_refused_and_harmless(comm: Box<dyn Communicator>) {
    let world_size = comm.world_size().get();
    let buffer = |numel| Buffer::heap(Numel(numel), DType::F32);
    let reduce = |partial, target| comm.reduce_scatter(ReduceScatter { partial, target }).err();
    let wrong_shard = ReduceTarget::Shard(buffer(3), Combine::Add);
    let wrong_full = ReduceTarget::ShardOf(buffer(2));
    let outsider = ProcessGroup::new(vec![comm.rank(), Rank(9)]).unwrap();
    let mut errors = vec![
        reduce(buffer(2 * world_size), wrong_shard),
        reduce(buffer(3 * world_size), wrong_full),
        comm.all_gather_into(buffer(2), buffer(2 * world_size + 1)).err(),
        comm.all_gather_into(Buffer::heap(Numel(2), DType::F16), buffer(2 * world_size)).err(),
        comm.broadcast(buffer(1), Rank(world_size)).err(),
        comm.split(&outsider).err(),
    ];
    if world_size > 1 {
        errors.push(reduce(buffer(world_size + 1), ReduceTarget::InPlace));
        errors.push(comm.all_gather(buffer(world_size + 1)).err());
    }
    for error in errors {
        assert!(matches!(error, Some(CommError::Misuse { .. })), "{error:?}");
    }
    let others = ProcessGroup::new(vec![Rank(9)]).unwrap();
    assert!(matches!(comm.split(&others), Err(CommError::NotInGroup { .. })));
    comm.barrier().unwrap();
}

/// The last rank gives up while the others wait; it fails too.
pub(crate) fn an_abort_reaches_every_rank(comm: Box<dyn Communicator>) {
    let last = Rank(comm.world_size().get() - 1);
    let group = comm.split(&ProcessGroup::world(comm.world_size())).unwrap();
    if comm.rank() == last {
        std::thread::sleep(Duration::from_millis(20));
        comm.abort("the data ended");
        comm.abort("a second reason");
    }
    for result in [group.barrier(), comm.barrier(), comm.exchange("a test", &[1]).map(drop)] {
        match result {
            Err(CommError::Aborted { rank, why }) => {
                assert_eq!((rank, why.as_str()), (last, "the data ended"));
            }
            result => panic!("{result:?} instead of an abort"),
        }
    }
}

pub(crate) fn a_rank_that_leaves_is_named_by_those_who_wait(comm: Box<dyn Communicator>) {
    let last = Rank(comm.world_size().get() - 1);
    comm.barrier().unwrap();
    if comm.rank() == last {
        std::thread::sleep(Duration::from_millis(20));
        return;
    }
    let started = Instant::now();
    for _ in 0..2 {
        match comm.barrier() {
            Err(CommError::PeerDead { rank, during }) => {
                assert_eq!((rank, during.as_str()), (last, "barrier"));
            }
            result => panic!("{result:?} instead of a dead peer"),
        }
    }
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}

/// Ranks from the third on leave at once; the first two go on by themselves.
pub(crate) fn leaving_early_harms_nobody_who_does_not_wait(comm: Box<dyn Communicator>) {
    let pair = ProcessGroup::new(comm.world_size().ranks().take(2).collect()).unwrap();
    comm.barrier().unwrap();
    if pair.rank_of(comm.rank()).is_none() {
        return;
    }
    let comm = comm.split(&pair).unwrap();
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(10));
        comm.barrier().unwrap();
    }
}
