//! A library of collectives that moves the host's memory over another communicator.

use std::ops::Range;
use std::time::Duration;

use oxizero_comm::library::{Library, LibraryError, communicator};
use oxizero_comm::{CommError, Communicator, DEFAULT_DEADLINE, ReduceScatter, ReduceTarget};
use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank};
use oxizero_device::kernels::Combine::Assign;
use oxizero_device::{Buffer, Region, View, ViewMut};

use crate::data::{Place, fill, value, values};

/// So little that most of what tests send passes in pieces.
const SCRATCH: Bytes = Bytes(16 << 10);

struct Moved {
    comm: Box<dyn Communicator>,
    members: ProcessGroup,
    scratch: Bytes,
}

/// The communicator of such a library.
pub(crate) fn over(comm: Box<dyn Communicator>) -> Box<dyn Communicator> {
    with_scratch(comm, SCRATCH)
}

fn with_scratch(comm: Box<dyn Communicator>, scratch: Bytes) -> Box<dyn Communicator> {
    let members = ProcessGroup::world(comm.world_size());
    communicator(Moved { comm, members, scratch })
}

impl Moved {
    fn assert_fits(&self, beside: usize) {
        assert!(beside <= self.scratch.0, "{beside} bytes beside the operands");
    }
}

impl Library for Moved {
    fn name(&self) -> &'static str {
        "the tests' library"
    }

    fn members(&self) -> &ProcessGroup {
        &self.members
    }

    fn rank(&self) -> Rank {
        self.comm.rank()
    }

    fn deadline(&self) -> Duration {
        DEFAULT_DEADLINE
    }

    fn scratch(&self) -> Bytes {
        self.scratch
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, LibraryError> {
        Ok(Region::heap(bytes))
    }

    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, LibraryError> {
        self.comm.exchange(self.name(), bytes).map_err(said)
    }

    fn all_to_all(
        &self,
        source: View<'_>,
        elements: Range<usize>,
        target: ViewMut<'_>,
    ) -> Result<(), LibraryError> {
        let (size, ranks) = (source.dtype().size(), self.members.size().get());
        let part = source.bytes().len() / ranks;
        let piece = elements.start * size..elements.end * size;
        let packs = if piece.len() < part { 2 } else { 1 };
        self.assert_fits(packs * ranks * piece.len());
        let own = self.rank().0 * part;
        let all = self.exchange(source.bytes())?;
        let parts = all.iter().flat_map(|all| &all[own + piece.start..own + piece.end]);
        put(parts.copied().collect(), target);
        Ok(())
    }

    fn all_gather(&self, shard: Option<View<'_>>, full: ViewMut<'_>) -> Result<(), LibraryError> {
        let numel = full.as_view().numel().0 / self.members.size().get();
        let own = self.rank().0 * numel..(self.rank().0 + 1) * numel;
        let shard = shard.unwrap_or_else(|| full.as_view().range(own));
        let shards = self.exchange(shard.bytes())?.concat();
        put(shards, full);
        Ok(())
    }

    fn broadcast(&self, buffer: ViewMut<'_>, root: Rank) -> Result<(), LibraryError> {
        let roots = self.exchange(buffer.as_view().bytes())?.swap_remove(root.0);
        put(roots, buffer);
        Ok(())
    }

    fn split(&self, group: &ProcessGroup) -> Result<Self, LibraryError> {
        let comm = self.comm.split(group).map_err(said)?;
        Ok(Self { comm, members: group.clone(), scratch: self.scratch })
    }

    /// The others of these tests find by themselves that something failed.
    fn abort(&self, _why: &str) {}
}

fn said(error: CommError) -> LibraryError {
    LibraryError::Failed(error.to_string())
}

fn put(bytes: Vec<u8>, target: ViewMut<'_>) {
    target.bytes_mut().copy_from_slice(&bytes);
}

/// The same bits, however much is summed at a time.
pub(crate) fn pieces_of_any_size_give_the_same_sum(comm: Box<dyn Communicator>) {
    let (world, ranks) = (ProcessGroup::world(comm.world_size()), comm.world_size().get());
    let numel = 1000 * ranks;
    let sum = |scratch| {
        let comm = with_scratch(comm.split(&world).unwrap(), scratch);
        assert_eq!(comm.scratch(), if ranks == 1 { Bytes(0) } else { scratch });
        let mut partial = crate::data::buffer(&*comm, Place::Alloc, numel, DType::F32);
        fill(&mut partial, 0..numel, |index| value(comm.rank().0, index, 0));
        let target = ReduceTarget::Shard(Buffer::heap(Numel(1000), DType::Bf16), Assign);
        let op = comm.reduce_scatter(ReduceScatter { partial, target }).unwrap().wait().unwrap();
        let ReduceTarget::Shard(sum, _) = op.target else { panic!("{op:?}") };
        values(&sum)
    };
    let whole = sum(Bytes(numel * 4));
    for scratch in [64, 400, 4001, numel * 4 - 1] {
        assert_eq!(sum(Bytes(scratch)), whole, "{scratch} bytes beside the operands");
    }
}
