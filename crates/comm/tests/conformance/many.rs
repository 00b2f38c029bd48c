//! Gathering many shards in one collective.

use oxizero_comm::{CommError, Communicator, OwnShard, Traffic};
use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank};
use oxizero_device::Buffer;

use crate::data::{Place, buffer, fill, rounded, value, values};

/// Elements of shards, by turns.
const SIZES: [usize; 7] = [5, 0, 17, 1, 9001, 64, 3];

/// One rank's shards of such sizes: parts of larger buffers, some on the heap and some allocated,
/// which are others on other ranks.
fn shards(comm: &dyn Communicator, sizes: &[usize], dtype: DType, seed: usize) -> Vec<OwnShard> {
    let rank = comm.rank().0;
    let shard = |(index, size): (usize, &usize)| {
        let place = if (index + rank).is_multiple_of(2) { Place::Heap } else { Place::Alloc };
        let own = index % 3..index % 3 + size;
        let mut buffer = buffer(comm, place, own.end + rank % 2, dtype);
        fill(&mut buffer, own.clone(), |i| value(rank, i - own.start + 100 * index, seed));
        OwnShard { buffer, own }
    };
    sizes.iter().enumerate().map(shard).collect()
}

/// What comes of [`shards`] on every rank.
fn expected(world_size: usize, sizes: &[usize], dtype: DType, seed: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for (index, size) in sizes.iter().enumerate() {
        for rank in 0..world_size {
            all.extend((0..*size).map(|i| rounded(value(rank, i + 100 * index, seed), dtype)));
        }
    }
    all
}

pub(crate) fn many_shards_are_one_collective(comm: Box<dyn Communicator>) {
    let world_size = comm.world_size().get();
    for count in [0, 1, 2, 3, 7, 20] {
        for dtype in DType::ALL {
            for place in [Place::Heap, Place::Alloc] {
                let sizes: Vec<usize> = (0..count).map(|i| SIZES[(i + count) % 7]).collect();
                let own: usize = sizes.iter().sum();
                let full = buffer(&*comm, place, own * world_size, dtype);
                let shards = shards(&*comm, &sizes, dtype, count);
                let before: Vec<_> = shards.iter().map(|shard| values(&shard.buffer)).collect();

                let start = comm.traffic();
                let (shards, full) = comm.all_gather_many(shards, full).unwrap().wait().unwrap();
                let bytes = Bytes(own * (world_size - 1) * dtype.size());
                let one = Traffic { collectives: 1, bytes, exchanges: 0 };
                assert_eq!(comm.traffic() - start, one);

                assert_eq!(values(&full), expected(world_size, &sizes, dtype, count));
                let after: Vec<_> = shards.iter().map(|shard| values(&shard.buffer)).collect();
                assert_eq!(after, before);
            }
        }
    }
}

/// Every rank offers its own shard of one memory, as the engine's replicas are.
pub(crate) fn shards_of_replicas_are_gathered(comm: Box<dyn Communicator>) {
    let (rank, world_size) = (comm.rank().0, comm.world_size().get());
    let shard = |size: usize| {
        let numel = Numel(size * world_size);
        let region = comm.alloc_replica(numel.bytes(DType::F32)).unwrap();
        let mut buffer = Buffer::new(region, DType::F32);
        let own = rank * size..(rank + 1) * size;
        fill(&mut buffer, own.clone(), |index| (size + index) as f32);
        OwnShard { buffer, own }
    };
    let shards = [1, 16, 3].map(shard).into();
    let full = Buffer::heap(Numel(20 * world_size), DType::F32);
    let (_shards, full) = comm.all_gather_many(shards, full).unwrap().wait().unwrap();
    let value = |size: usize| (0..size * world_size).map(move |index| (size + index) as f32);
    assert_eq!(full.f32(), [1, 16, 3].into_iter().flat_map(value).collect::<Vec<_>>());
}

/// The sizes differ in the middle, and not in all.
pub(crate) fn other_sizes_of_shards_are_named(comm: Box<dyn Communicator>) {
    let last = Rank(comm.world_size().get() - 1);
    if last == Rank(0) {
        return;
    }
    let group = comm.split(&ProcessGroup::world(comm.world_size())).unwrap();
    let [mine, other] = match comm.rank() == last {
        true => [[3, 5, 2], [3, 4, 3]],
        false => [[3, 4, 3], [3, 5, 2]],
    };
    let shards = shards(&*group, &mine, DType::Bf16, 0);
    let full = buffer(&*group, Place::Heap, 10 * comm.world_size().get(), DType::Bf16);
    match group.all_gather_many(shards, full).unwrap().wait() {
        Err(CommError::Mismatch { rank, expected, other: who, got, .. }) => {
            assert_eq!(rank, comm.rank());
            assert_eq!(who, if comm.rank() == last { Rank(0) } else { last });
            let text = |sizes: [usize; 3]| format!("whose shard 1 has {} elements", sizes[1]);
            assert!(expected.contains(&text(mine)), "{expected}");
            assert!(got.contains(&text(other)), "{got}");
        }
        result => panic!("{result:?} instead of a mismatch"),
    }
    assert!(matches!(group.barrier(), Err(CommError::Mismatch { .. })));
    comm.barrier().unwrap();
}

pub(crate) fn shards_that_do_not_fit_are_refused(comm: Box<dyn Communicator>) {
    let world_size = comm.world_size().get();
    let full = |numel, dtype| Buffer::heap(Numel(numel * world_size), dtype);
    let shard = |dtype, own| OwnShard { buffer: Buffer::heap(Numel(4), dtype), own };
    let [f32, bf16] = [DType::F32, DType::Bf16];
    let calls = [
        (vec![shard(f32, 0..4), shard(bf16, 0..2)], full(6, f32), "shard 1 is bf16"),
        (vec![shard(f32, 0..4), shard(f32, 1..3)], full(7, f32), "2 shards of 6 elements"),
        (vec![shard(f32, 0..4), shard(f32, 3..5)], full(6, f32), "shard 1 is 3..5 of a buffer"),
        (vec![], full(1, f32), "0 shards"),
    ];
    for (shards, full, words) in calls {
        match comm.all_gather_many(shards, full) {
            Err(error @ CommError::Misuse { .. }) => {
                assert!(error.to_string().contains(words), "{error}");
            }
            result => panic!("{result:?} instead of misuse"),
        }
    }
    comm.barrier().unwrap();
}
