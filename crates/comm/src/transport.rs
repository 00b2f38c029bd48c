//! How ranks meet. A back end implements [`Transport`]; the collectives are built on it.

use std::ops::Range;

use oxizero_core::{Bytes, ProcessGroup, Rank, WorldSize};
use oxizero_device::Region;

pub(crate) use crate::failure::Failure;
use crate::operation::Operation;
use crate::peer_views::PeerPieces;
use crate::{Allocated, CommError};

/// One rank's end of a process group.
pub(crate) trait Transport: Send + Sync + Sized + 'static {
    /// The members, by their numbers in the world.
    fn members(&self) -> &ProcessGroup;

    /// This rank's place among the members.
    fn rank(&self) -> Rank;

    /// How many ranks the world has, of which the members may be a part.
    fn ranks_of_the_world(&self) -> WorldSize;

    /// Posts `operation` and `offer`, waits until every member has posted, compares, calls `read`
    /// once, and waits until every member has read.
    ///
    /// `read` is given the offer's region back, or an empty one. It may write to those bytes of it
    /// that no other member reads in this operation.
    fn meet(
        &self,
        operation: &Operation,
        offer: Offer<'_>,
        read: &mut dyn FnMut(&mut Region, &dyn Peers),
    ) -> Result<(), CommError>;

    /// How members lend memory beyond an operation; `None` where they share none.
    fn lender(&self) -> Option<&dyn Lender> {
        None
    }

    /// Whether members can write to what others offer, as [`Offer::Shared`] says.
    fn writes_to_peers(&self) -> bool {
        false
    }

    /// See [`Communicator::alloc`](crate::Communicator::alloc).
    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError>;

    /// See [`Communicator::alloc_scratch`](crate::Communicator::alloc_scratch).
    fn alloc_scratch(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.alloc(bytes)
    }

    /// Meets the other members for `operation`, whose numel is the size in bytes.
    fn alloc_replica(&self, operation: &Operation) -> Result<Region, CommError>;

    /// See [`Communicator::shares_replicas`](crate::Communicator::shares_replicas).
    fn shares_replicas(&self) -> bool;

    /// This rank's end of a new group; every member of `group`, which this rank is in, calls it.
    fn split(&self, group: &ProcessGroup) -> Result<Self, CommError>;

    /// See [`Communicator::abort`](crate::Communicator::abort).
    fn abort(&self, why: &str);

    /// See [`Communicator::allocated`](crate::Communicator::allocated).
    fn allocated(&self) -> Allocated;
}

/// Lends memory to the other members.
pub(crate) trait Lender {
    /// Whether `piece` lies in memory that all share; others cannot be lent.
    fn reaches(&self, piece: &[u8]) -> bool;

    /// Meets the other members for `operation`, and returns what they have lent, as many pieces as
    /// this rank. All stays as it is until the members have met again, or there is a failure.
    fn lend(
        &self,
        operation: &Operation,
        pieces: &[&[u8]],
    ) -> Result<Box<dyn PeerPieces>, CommError>;
}

/// The bytes that the other members may read during one operation.
pub(crate) enum Offer<'a> {
    /// So many bytes of one region.
    Range(&'a mut Region, Range<usize>),
    /// All bytes of one region, which other members write to as well: each byte is read and
    /// written by one member alone, the same in all of the members' regions.
    Shared(&'a mut Region),
    /// Several runs of bytes, wherever they lie.
    Pieces(&'a [&'a [u8]]),
}

/// What the other members offer.
pub(crate) trait Peers {
    /// What `rank`, another member, offers as its piece `index`; it offers as many as this rank.
    fn piece(&self, rank: Rank, index: usize) -> &[u8];

    /// Where that lies in the memory that all share.
    fn place(&self, rank: Rank, index: usize) -> Option<Range<usize>> {
        let _ = (rank, index);
        None
    }

    /// The bytes of `range` of what `rank`, another member, offers; on a multiple of 64 bytes
    /// where the offer and the range start on one.
    fn bytes(&self, rank: Rank, range: Range<usize>) -> &[u8];

    /// Writes over `range` of what `rank`, another member, offers as [`Offer::Shared`].
    ///
    /// # Panics
    ///
    /// If the transport does not write to peers, or the range ends after the offer.
    fn write(&self, rank: Rank, range: Range<usize>, bytes: &[u8]) {
        unreachable!("{range:?} of rank {rank} cannot be written: {} bytes", bytes.len());
    }

    /// Whether what `rank` offers starts at this very address: then there is nothing to copy.
    fn lies_at(&self, rank: Rank, address: usize) -> bool;
}
