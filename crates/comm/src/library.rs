//! Back ends whose library brings its own collectives, such as `torch.distributed` or MPI.
//!
//! The library moves bytes, wherever they lie. What a collective is to the engine is decided here:
//! who calls what is compared before data is touched, and sums over ranks are made by the kernels,
//! in f32 and in rank order, never by the library. A reduce-scatter is an exchange of shards, and
//! then a sum; several all-gathers are one, of what is packed together. Either takes as much memory
//! beside its operands as [`Library::scratch`] allows: what is larger passes a piece at a time.
//!
//! To compare, ranks tell each other 168 bytes before each operation. The bytes of a small
//! exchange travel with them, as do the lengths of a few shards.

mod group;
mod packed;

use std::ops::Range;
use std::time::Duration;

use oxizero_core::{Bytes, ProcessGroup, Rank};
use oxizero_device::{Region, View, ViewMut};

use self::group::Group;
use crate::Communicator;

/// What an operation may take beside its operands unless a library says otherwise: so much that
/// the start of each piece costs little beside the piece, and little beside a model.
const SCRATCH: Bytes = Bytes(64 << 20);

/// One rank's end of a process group in a library. All members make the same calls in the same
/// order; views lie where [`alloc`](Self::alloc) allocates, and a call may return before the bytes
/// have moved if what is done with them later waits for that.
pub trait Library: Send + Sync + 'static {
    /// What it is called, for errors.
    fn name(&self) -> &'static str;

    /// The members, by their numbers in the world.
    fn members(&self) -> &ProcessGroup;

    /// This rank's place among the members.
    fn rank(&self) -> Rank;

    /// How long a rank waits for another.
    fn deadline(&self) -> Duration;

    /// The most memory that an operation may take beside its operands; the same on all members.
    fn scratch(&self) -> Bytes {
        SCRATCH
    }

    /// Zeroed memory of this rank's own.
    fn alloc(&self, bytes: Bytes) -> Result<Region, LibraryError>;

    /// Every member's `bytes` of the host, equally many on each, in their order.
    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, LibraryError>;

    /// Gives each member `elements` of its equal part of `source`, and fills `target` with those
    /// that the members have for this rank, in their order. To put them side by side may take as
    /// much memory as `target`, unless they are the whole parts.
    fn all_to_all(
        &self,
        source: View<'_>,
        elements: Range<usize>,
        target: ViewMut<'_>,
    ) -> Result<(), LibraryError>;

    /// Fills `full` with every member's equal part; this rank's is `shard`, or lies there already.
    fn all_gather(&self, shard: Option<View<'_>>, full: ViewMut<'_>) -> Result<(), LibraryError>;

    /// Overwrites every member's `buffer` with that of member `root`.
    fn broadcast(&self, buffer: ViewMut<'_>, root: Rank) -> Result<(), LibraryError>;

    /// This rank's end of a new group of some of the members; all of the new group call it.
    fn split(&self, group: &ProcessGroup) -> Result<Self, LibraryError>
    where
        Self: Sized;

    /// This rank gives up; the others' operations fail, as soon as the library can make them.
    fn abort(&self, why: &str);
}

/// What a library failed with. Ranks are numbered as in the world.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LibraryError {
    /// A rank is gone.
    #[error("rank {0} ended")]
    Dead(Rank),
    /// A rank did not come within the deadline.
    #[error("rank {0} did not come within the deadline")]
    Late(Rank),
    /// A rank gave up, and said why.
    #[error("rank {0} gave up: {1}")]
    Aborted(Rank, String),
    /// The library's own words, where they do not tell whose fault it is.
    #[error("{0}")]
    Failed(String),
}

/// The communicator of one rank's end of a group.
pub fn communicator(library: impl Library) -> Box<dyn Communicator> {
    Box::new(Group::new(library))
}
