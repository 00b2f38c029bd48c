//! The shards of all ranks, read where they lie.

use std::fmt;
use std::ops::Range;

use oxizero_core::{DType, Numel, Rank};
use oxizero_device::{Buffer, View};

use crate::checks::misuse;
use crate::{CommError, Communicator, OwnShard, numbers};

/// Every rank's shards, for reading. This rank's own are lent meanwhile: it owns their buffers, and
/// gives them back in [`Communicator::end_peer_views`], when no rank reads them any more. Dropping
/// it before that fails all ranks, as others may still read.
pub struct PeerViews {
    rank: Rank,
    dtype: DType,
    own: Vec<OwnShard>,
    others: Others,
}

enum Others {
    InPlace(Box<dyn PeerPieces>),
    /// One copy: shard after shard, and of each the ranks' in their order.
    Copied {
        full: Buffer,
        /// By shard, then by rank.
        places: Vec<Vec<Range<usize>>>,
    },
    /// No rank reads any more.
    Ended,
}

/// What the other members of a group have lent to this rank.
pub(crate) trait PeerPieces: Send + Sync {
    /// What `rank`, another member, has lent as its piece `index`.
    fn piece(&self, rank: Rank, index: usize) -> &[u8];

    /// Fails all ranks: this rank's pieces are about to be gone.
    fn abandon(&self);
}

impl PeerViews {
    pub(crate) fn in_place(
        rank: Rank,
        dtype: DType,
        own: Vec<OwnShard>,
        lent: Box<dyn PeerPieces>,
    ) -> Self {
        Self { rank, dtype, own, others: Others::InPlace(lent) }
    }

    /// Shard `index` of `rank`.
    ///
    /// # Panics
    ///
    /// If the group has no such rank, or lent no such shard.
    pub fn get(&self, rank: Rank, index: usize) -> View<'_> {
        match &self.others {
            _ if rank == self.rank => self.own[index].view(),
            Others::InPlace(lent) => View::of_bytes(lent.piece(rank, index), self.dtype),
            Others::Copied { full, places } => full.range(places[index][rank.0].clone()),
            Others::Ended => unreachable!("views that have ended are gone"),
        }
    }

    /// Whether the other ranks' shards are copies, as where ranks share no memory.
    pub fn is_copy(&self) -> bool {
        matches!(self.others, Others::Copied { .. })
    }

    /// This rank's shards, when no other rank reads them any more.
    pub(crate) fn into_own(mut self) -> Vec<OwnShard> {
        self.others = Others::Ended;
        std::mem::take(&mut self.own)
    }
}

impl Drop for PeerViews {
    fn drop(&mut self) {
        if let Others::InPlace(lent) = &self.others {
            lent.abandon();
        }
    }
}

impl fmt::Debug for PeerViews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, dtype, own, .. } = self;
        let how = if self.is_copy() { "copied" } else { "in place" };
        write!(f, "PeerViews({} shards a rank of {dtype} on rank {rank}, {how})", own.len())
    }
}

pub(crate) fn check(shards: &[OwnShard], dtype: DType) -> Result<(), CommError> {
    let other = shards.iter().find(|shard| shard.buffer.dtype() != dtype);
    other.map_or(Ok(()), |shard| {
        let problem = format!("a shard is {}, not {dtype}", shard.buffer.dtype());
        Err(misuse("peer views", problem))
    })
}

/// Copies every rank's shards, for back ends whose ranks share no memory.
pub(crate) fn copied<C: Communicator + ?Sized>(
    comm: &C,
    shards: Vec<OwnShard>,
    dtype: DType,
) -> Result<PeerViews, CommError> {
    check(&shards, dtype)?;
    let told = numbers::exchange(comm, "views", shards.iter().map(|shard| shard.own.len()))?;
    let mut end = 0;
    let mut place = |len| {
        let start = end;
        end += len;
        start..end
    };
    let of_shard = |index| told.iter().map(|lens| place(lens[index])).collect();
    let places: Vec<Vec<_>> = (0..shards.len()).map(of_shard).collect();
    let full = Buffer::new(comm.alloc(Numel(end).bytes(dtype))?, dtype);
    let (own, full) = comm.all_gather_many(shards, full)?.wait()?;
    Ok(PeerViews { rank: comm.rank(), dtype, own, others: Others::Copied { full, places } })
}
