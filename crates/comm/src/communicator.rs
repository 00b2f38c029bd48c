//! The collectives that an engine may ask for.

use std::ops::Range;

use oxizero_core::{Bytes, DType, ProcessGroup, Rank, WorldSize};
use oxizero_device::kernels::Combine;
use oxizero_device::{Buffer, Region, View};

use crate::group::reduce_and_gather;
use crate::{CommError, Handle, PeerViews, Queue, one_by_one, peer_views};

/// Moves flat buffers between the ranks of one process group.
///
/// Every rank calls the same operations in the same order; each operation carries its sequence
/// number, kind, dtype and element count, which are compared across ranks before data is touched.
/// An operation owns its buffers until its handle is waited for. Arithmetic is in f32: the sum over
/// ranks is a balanced binary tree in rank order, and rounds once, into the output's dtype.
pub trait Communicator: Send + Sync {
    /// This process's place in the group.
    fn rank(&self) -> Rank;

    /// Processes in the group.
    fn world_size(&self) -> WorldSize;

    /// Zeroed memory of this rank's own, which collectives move fastest. Other memory works too.
    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError>;

    /// The same for what is written before it is read: it may be zeroed or not, which saves a pass
    /// over it.
    fn alloc_scratch(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.alloc(bytes)
    }

    /// Zeroed memory for a buffer that every rank will hold in full; a collective call.
    ///
    /// Where [`shares_replicas`](Self::shares_replicas), the ranks of a host get one memory, and
    /// each may write only its own shard, and that only while no rank reads.
    fn alloc_replica(&self, bytes: Bytes) -> Result<Region, CommError>;

    /// Whether [`alloc_replica`](Self::alloc_replica) gives the ranks one memory.
    fn shares_replicas(&self) -> bool;

    /// The most memory that a reduce-scatter takes beside its operands while it runs, and never
    /// more than `partial` itself; nothing where ranks read each other's memory.
    fn scratch(&self) -> Bytes {
        Bytes(0)
    }

    /// Sums every rank's `partial`, and gives each rank its shard of the sum.
    ///
    /// Shard `r` is the `r`-th of `world_size` equal parts.
    fn reduce_scatter(&self, op: ReduceScatter) -> Result<Handle<ReduceScatter>, CommError>;

    /// Completes `full`, in which every rank has put its own shard.
    fn all_gather(&self, full: Buffer) -> Result<Handle<Buffer>, CommError>;

    /// Concatenates every rank's `shard`, in rank order, into `full`, which is this rank's own
    /// memory: a shared replica is completed by [`all_gather`](Self::all_gather).
    fn all_gather_into(
        &self,
        shard: Buffer,
        full: Buffer,
    ) -> Result<Handle<(Buffer, Buffer)>, CommError>;

    /// Several all-gathers in one collective. It concatenates into `full`, which is this rank's own
    /// memory: place after place in `shards`, and for each every rank's shard, in rank order.
    ///
    /// All are of one dtype, and all ranks give equally many. A shard may have another length on
    /// each rank, none included; those of all ranks together are as long as `full`, or all ranks
    /// fail with [`CommError::Unfilled`].
    ///
    /// A back end that does not bring its own, since it cannot make one collective of several,
    /// gathers them one after the other.
    fn all_gather_many(
        &self,
        shards: Vec<OwnShard>,
        full: Buffer,
    ) -> Result<Handle<(Vec<OwnShard>, Buffer)>, CommError> {
        Ok(Handle::done(one_by_one::gather(self, shards, full)))
    }

    /// Lets every rank read all ranks' `shards`, which are of `dtype`, until
    /// [`end_peer_views`](Self::end_peer_views); all ranks give equally many. One collective: what
    /// a rank wrote before is seen by all.
    ///
    /// Where ranks share memory, shards of [`alloc`](Self::alloc) are read where they lie, and
    /// others are refused. Other back ends copy, and [`PeerViews::is_copy`] says so.
    fn peer_views(&self, shards: Vec<OwnShard>, dtype: DType) -> Result<PeerViews, CommError> {
        peer_views::copied(self, shards, dtype)
    }

    /// Waits until no rank reads this rank's shards any more, and returns them. A rank that does
    /// not call it is named at the deadline. Nobody waits for what was copied.
    fn end_peer_views(&self, views: PeerViews) -> Result<Vec<OwnShard>, CommError> {
        assert!(views.is_copy(), "{views:?} are another communicator's");
        Ok(views.into_own())
    }

    /// Sums every rank's `buffer`, and gives every rank the whole sum in its place.
    fn all_reduce(&self, buffer: Buffer) -> Result<Handle<Buffer>, CommError> {
        reduce_and_gather(self, buffer)
    }

    /// Overwrites every rank's `buffer` with `root`'s.
    fn broadcast(&self, buffer: Buffer, root: Rank) -> Result<Handle<Buffer>, CommError>;

    /// Every rank's `bytes`, in rank order; a few numbers that all ranks must agree upon, and
    /// equally many on each. Where ranks disagree, an error tells the beginning of `label`, which
    /// says what the exchange is for.
    fn exchange(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;

    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<(), CommError>;

    /// The communicator of some of this group's ranks; a collective call of the members.
    ///
    /// `group` numbers its members as the world does; in the new communicator they count from 0.
    fn split(&self, group: &ProcessGroup) -> Result<Box<dyn Communicator>, CommError>;

    /// Makes every operation of every rank fail with [`CommError::Aborted`], now and later.
    fn abort(&self, why: &str);

    /// What this rank has asked for so far.
    fn traffic(&self) -> Traffic;

    /// What there is of shared memory; nothing where `alloc` gives heap memory.
    fn allocated(&self) -> Allocated;

    /// The way to the thread that operations run on; `None` where they run on the thread that
    /// issues them, and are complete when their handle is returned. See [`issue`](crate::issue).
    fn queue(&self) -> Option<&Queue> {
        None
    }
}

/// This rank's part of what ranks hold parts of, not necessarily equal ones.
#[derive(Debug)]
pub struct OwnShard {
    /// A buffer that holds the part.
    pub buffer: Buffer,
    /// The part's elements in it; there may be none.
    pub own: Range<usize>,
}

impl OwnShard {
    /// The part.
    pub fn view(&self) -> View<'_> {
        self.buffer.range(self.own.clone())
    }
}

/// The operands of a reduce-scatter; they come back with the handle.
#[derive(Debug)]
pub struct ReduceScatter {
    /// This rank's contribution to every shard, in the wire dtype.
    pub partial: Buffer,
    /// Where the sum goes.
    pub target: ReduceTarget,
}

/// Where a reduce-scatter puts this rank's shard of the sum.
#[derive(Debug)]
pub enum ReduceTarget {
    /// Over this rank's own shard of `partial`.
    InPlace,
    /// Into a buffer of one shard's elements.
    Shard(Buffer, Combine),
    /// Over this rank's own shard of a buffer as long as `partial`.
    ShardOf(Buffer),
}

/// Counts of one rank's collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Collectives that moved tensors.
    pub collectives: usize,
    /// Bytes of other ranks that this rank read, in the dtype that travelled; none where the ranks
    /// share the memory.
    pub bytes: Bytes,
    /// Small exchanges and barriers.
    pub exchanges: usize,
}

/// Shared memory: what one rank asked for, in sizes as asked, and what the system counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocated {
    /// Regions of [`Communicator::alloc`] that are alive.
    pub own: Bytes,
    /// Regions of [`Communicator::alloc_replica`] that are alive, in full, though shared.
    pub replicas: Bytes,
    /// The pages that the system holds for all ranks of the host together, each once.
    pub resident: Bytes,
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self {
            collectives: self.collectives + more.collectives,
            bytes: self.bytes + more.bytes,
            exchanges: self.exchanges + more.exchanges,
        }
    }
}

impl std::ops::Sub for Traffic {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            collectives: self.collectives - before.collectives,
            bytes: self.bytes - before.bytes,
            exchanges: self.exchanges - before.exchanges,
        }
    }
}
