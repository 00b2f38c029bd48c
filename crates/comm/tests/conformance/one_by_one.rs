//! A back end that cannot make one collective of several.

use oxizero_comm::{Allocated, CommError, Communicator, Handle, OwnShard, ReduceScatter, Traffic};
use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank, WorldSize};
use oxizero_device::{Buffer, Region};

use crate::data::Place;
use crate::many::{LENGTHS, gather_and_compare};

/// Has only what a back end must bring.
struct Plain(Box<dyn Communicator>);

impl Communicator for Plain {
    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.0.world_size()
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.0.alloc(bytes)
    }

    fn alloc_replica(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.0.alloc_replica(bytes)
    }

    fn shares_replicas(&self) -> bool {
        self.0.shares_replicas()
    }

    fn reduce_scatter(&self, op: ReduceScatter) -> Result<Handle<ReduceScatter>, CommError> {
        self.0.reduce_scatter(op)
    }

    fn all_gather(&self, full: Buffer) -> Result<Handle<Buffer>, CommError> {
        self.0.all_gather(full)
    }

    fn all_gather_into(
        &self,
        shard: Buffer,
        full: Buffer,
    ) -> Result<Handle<(Buffer, Buffer)>, CommError> {
        self.0.all_gather_into(shard, full)
    }

    fn broadcast(&self, buffer: Buffer, root: Rank) -> Result<Handle<Buffer>, CommError> {
        self.0.broadcast(buffer, root)
    }

    fn exchange(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.0.exchange(label, bytes)
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.0.barrier()
    }

    fn split(&self, group: &ProcessGroup) -> Result<Box<dyn Communicator>, CommError> {
        self.0.split(group)
    }

    fn abort(&self, why: &str) {
        self.0.abort(why);
    }

    fn traffic(&self) -> Traffic {
        self.0.traffic()
    }

    fn allocated(&self) -> Allocated {
        self.0.allocated()
    }
}

pub(crate) fn shards_that_are_gathered_one_by_one_are_the_same(comm: Box<dyn Communicator>) {
    let comm = Plain(comm);
    for (count, lengths) in [0, 1, 3, 7].iter().flat_map(|n| LENGTHS.map(|l| (*n, l))) {
        for dtype in DType::ALL {
            let start = comm.traffic();
            gather_and_compare(&comm, count, lengths, dtype, Place::Heap);
            assert_eq!((comm.traffic() - start).collectives, count);
        }
    }
    // One rank offers, or asks for, something else; all refuse alike.
    let last = comm.rank().0 + 1 == comm.world_size().get();
    let ranks = comm.world_size().get();
    for (own, asked) in [(if last { 1 } else { 2 }, 2 * ranks), (2, 2 * ranks + usize::from(last))]
    {
        let own = OwnShard { buffer: Buffer::heap(Numel(2), DType::F32), own: 0..own };
        let full = Buffer::heap(Numel(asked), DType::F32);
        let error = comm.all_gather_many(vec![own], full).unwrap().wait().unwrap_err();
        assert!(matches!(error, CommError::Unfilled { .. }), "{error}");
    }
    let narrow = OwnShard { buffer: Buffer::heap(Numel(1), DType::Bf16), own: 0..1 };
    let full = Buffer::heap(Numel(ranks), DType::F32);
    let error = comm.all_gather_many(vec![narrow], full).unwrap().wait().unwrap_err();
    assert!(matches!(error, CommError::Misuse { .. }), "{error}");
    comm.barrier().unwrap();
}
