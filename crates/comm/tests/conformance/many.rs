//! Gathering many shards in one collective.

use oxizero_comm::{CommError, Communicator, OwnShard, Traffic};
use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank};
use oxizero_device::Buffer;

use crate::data::{Place, buffer, fill, rounded, value, values};

/// Elements of shards, by turns.
const SIZES: [usize; 7] = [5, 0, 17, 1, 9001, 64, 3];

/// The length of a rank's shard of some place, in a world of so many ranks.
pub(crate) type Lengths = fn(place: usize, rank: usize, world_size: usize) -> usize;

pub(crate) const LENGTHS: [Lengths; 4] = [
    |place, _, _| SIZES[place % 7],
    |place, rank, _| SIZES[(place + 3 * rank) % 7],
    // One rank holds all of it, as where a bucket's shard boundary lies in no small parameter.
    |place, rank, world_size| if rank == place % world_size { SIZES[place % 7] } else { 0 },
    |place, rank, world_size| if rank + 1 == world_size { 0 } else { SIZES[place % 7] + rank },
];

/// One rank's shards of such sizes: parts of larger buffers, some on the heap and some allocated,
/// which are others on other ranks.
fn shards(comm: &dyn Communicator, sizes: &[usize], dtype: DType, seed: usize) -> Vec<OwnShard> {
    let place = |turn: usize| if turn.is_multiple_of(2) { Place::Heap } else { Place::Alloc };
    shards_in(comm, sizes, (dtype, seed), place)
}

/// The same, where `place` says.
pub(crate) fn shards_in(
    comm: &dyn Communicator,
    sizes: &[usize],
    (dtype, seed): (DType, usize),
    place: impl Fn(usize) -> Place,
) -> Vec<OwnShard> {
    let rank = comm.rank().0;
    let shard = |(index, size): (usize, &usize)| {
        let place = place(index + rank);
        let own = index % 3..index % 3 + size;
        let mut buffer = buffer(comm, place, own.end + rank % 2, dtype);
        fill(&mut buffer, own.clone(), |i| value(rank, i - own.start + 100 * index, seed));
        OwnShard { buffer, own }
    };
    sizes.iter().enumerate().map(shard).collect()
}

/// What comes of [`shards`] on every rank, whose sizes are given by rank.
fn expected(sizes: &[Vec<usize>], dtype: DType, seed: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for index in 0..sizes[0].len() {
        for (rank, sizes) in sizes.iter().enumerate() {
            let value = |i| rounded(value(rank, i + 100 * index, seed), dtype);
            all.extend((0..sizes[index]).map(value));
        }
    }
    all
}

pub(crate) fn many_shards_are_one_collective(comm: Box<dyn Communicator>) {
    for (count, lengths) in [0, 1, 2, 3, 7, 20].iter().flat_map(|n| LENGTHS.map(|l| (*n, l))) {
        for dtype in DType::ALL {
            for place in [Place::Heap, Place::Alloc] {
                gather(&*comm, count, lengths, dtype, place);
            }
        }
    }
}

fn gather(comm: &dyn Communicator, count: usize, lengths: Lengths, dtype: DType, place: Place) {
    let start = comm.traffic();
    let (numel, own) = gather_and_compare(comm, count, lengths, dtype, place);
    let bytes = Bytes((numel - own) * dtype.size());
    assert_eq!(comm.traffic() - start, Traffic { collectives: 1, bytes, exchanges: 0 });
}

/// Returns the elements that were gathered, and how many of them were this rank's own.
pub(crate) fn gather_and_compare(
    comm: &dyn Communicator,
    count: usize,
    lengths: Lengths,
    dtype: DType,
    place: Place,
) -> (usize, usize) {
    let ranks = comm.world_size().get();
    let length = |index, rank| lengths(index + count, rank, ranks);
    let sizes: Vec<Vec<usize>> =
        (0..ranks).map(|rank| (0..count).map(|index| length(index, rank)).collect()).collect();
    let numel: usize = sizes.iter().flatten().sum();
    let own = &sizes[comm.rank().0];
    let full = buffer(comm, place, numel, dtype);
    let shards = shards(comm, own, dtype, count);
    let before: Vec<_> = shards.iter().map(|shard| values(&shard.buffer)).collect();

    let (shards, full) = comm.all_gather_many(shards, full).unwrap().wait().unwrap();
    assert_eq!(values(&full), expected(&sizes, dtype, count), "{sizes:?}");
    let after: Vec<_> = shards.iter().map(|shard| values(&shard.buffer)).collect();
    assert_eq!(after, before);
    (numel, own.iter().sum())
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

/// The last rank offers one element less, or one more, than would fill what all ask for.
pub(crate) fn lengths_that_do_not_add_up_are_an_error_on_every_rank(comm: Box<dyn Communicator>) {
    let ranks = comm.world_size().get();
    for wrong in [1, 3] {
        let group = comm.split(&ProcessGroup::world(comm.world_size())).unwrap();
        let size = |rank| if rank == ranks - 1 { 5 + wrong } else { 7 };
        let shards = shards(&*group, &[5, size(comm.rank().0) - 5], DType::Bf16, 0);
        let full = buffer(&*group, Place::Heap, 7 * ranks, DType::Bf16);
        let error = group.all_gather_many(shards, full).unwrap().wait().unwrap_err();
        let CommError::Unfilled { offered, .. } = &error else { panic!("{error}") };
        assert_eq!(*offered, (0..ranks).map(|r| (Rank(r), Numel(size(r)))).collect::<Vec<_>>());
        let told = error.to_string();
        let wanted = format!("all-gather from 2 shards a rank of {} bf16", 7 * ranks);
        let got =
            format!("{} of rank {} are {} elements", 5 + wrong, ranks - 1, 7 * ranks + wrong - 2);
        assert!(told.contains(&wanted) && told.contains(&got), "{told}");
        assert!(matches!(group.barrier(), Err(CommError::Unfilled { .. })), "it is not final");
    }
    comm.barrier().unwrap();
}

/// Ranks that want different sums are told as such, though their own shards would fill one.
pub(crate) fn other_sums_of_shards_are_named(comm: Box<dyn Communicator>) {
    let ranks = comm.world_size().get();
    if ranks == 1 {
        return;
    }
    let group = comm.split(&ProcessGroup::world(comm.world_size())).unwrap();
    let [mine, other] = if comm.rank() == Rank(0) { [6, 4] } else { [4, 6] };
    let shards = shards(&*group, &[mine], DType::F32, 0);
    let full = buffer(&*group, Place::Heap, mine * ranks, DType::F32);
    match group.all_gather_many(shards, full).unwrap().wait() {
        Err(CommError::Mismatch { rank, expected, got, .. }) => {
            assert_eq!(rank, comm.rank());
            let text = |size| format!("all-gather from 1 shards a rank of {} f32", size * ranks);
            assert_eq!((expected, got), (text(mine), text(other)));
        }
        result => panic!("{result:?} instead of a mismatch"),
    }
    comm.barrier().unwrap();
}

pub(crate) fn shards_that_do_not_fit_are_refused(comm: Box<dyn Communicator>) {
    let world_size = comm.world_size().get();
    let full = |numel, dtype| Buffer::heap(Numel(numel * world_size), dtype);
    let shard = |dtype, own| OwnShard { buffer: Buffer::heap(Numel(4), dtype), own };
    let [f32, bf16] = [DType::F32, DType::Bf16];
    let calls = [
        (vec![shard(f32, 0..4), shard(bf16, 0..2)], full(6, f32), "shard 1 is bf16"),
        (vec![shard(f32, 0..4), shard(f32, 3..5)], full(6, f32), "shard 1 is 3..5 of a buffer"),
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
