//! The collectives, written once over a [`Transport`].

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank, WorldSize};
use oxizero_device::kernels::{self, Combine, tree_sum, tree_sum_in_place};
use oxizero_device::{Buffer, Region, View, ViewMut};

use crate::checks::{
    check_gather_into, check_gather_many, check_reduce_scatter, check_root, check_shards, misuse,
};
use crate::error::KnownTo;
use crate::operation::{Kind, Label, Operation};
use crate::transport::{Offer, Peers, Transport};
use crate::{
    Allocated, CommError, Communicator, Handle, OwnShard, PeerViews, ReduceScatter, ReduceTarget,
    Traffic, peer_views,
};

/// The bytes of a sum that are written to all ranks at once: a few blocks of them fit into the
/// second-level cache.
const SUMMED_AT_ONCE: usize = 128 << 10;

/// One rank's communicator. Operations run when they are issued, on the calling thread.
pub(crate) struct Group<T> {
    transport: T,
    /// Held during an operation, so that one rank's threads cannot mix theirs.
    calls: Mutex<Calls>,
    traffic: Mutex<Traffic>,
}

#[derive(Default)]
struct Calls {
    count: u64,
    failure: Option<CommError>,
}

impl<T: Transport> Group<T> {
    pub(crate) fn new(transport: T) -> Self {
        Self { transport, calls: Mutex::default(), traffic: Mutex::default() }
    }

    /// The calls of this rank so far, unless one of them has failed.
    fn calls(&self) -> Result<MutexGuard<'_, Calls>, CommError> {
        let calls = lock(&self.calls);
        calls.failure.clone().map_or(Ok(calls), Err)
    }

    /// Runs the group's next operation; an error is final.
    fn run<R>(
        &self,
        kind: Kind,
        dtype: Option<DType>,
        numel: Numel,
        deed: impl FnOnce(&Operation) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let mut calls = self.calls()?;
        calls.count += 1;
        let result = deed(&Operation { sequence: calls.count, kind, dtype, numel });
        self.settle(&mut calls, result)
    }

    /// Keeps an error, and tells it to the others where they cannot know it.
    fn settle<R>(&self, calls: &mut Calls, result: Result<R, CommError>) -> Result<R, CommError> {
        result.inspect_err(|error| {
            let is_world = self.world_size() == self.transport.ranks_of_the_world();
            let all_know = match error.known_to() {
                KnownTo::Rank => false,
                KnownTo::Group => is_world,
                KnownTo::World => true,
            };
            if !all_know {
                self.transport.abort(&error.to_string());
            }
            calls.failure = Some(error.clone());
        })
    }

    fn others(&self) -> impl Iterator<Item = Rank> {
        let rank = self.rank();
        self.world_size().ranks().filter(move |other| *other != rank)
    }

    fn count_collective(&self, bytes: Bytes) {
        let mut traffic = lock(&self.traffic);
        traffic.collectives += 1;
        traffic.bytes += bytes;
    }

    /// The bytes of member `rank`'s shard of a buffer of so many bytes.
    fn shard(&self, bytes: Bytes, rank: Rank) -> Range<usize> {
        let shard = bytes.0 / self.world_size().get();
        rank.0 * shard..(rank.0 + 1) * shard
    }

    fn sum(
        &self,
        operation: &Operation,
        mut op: ReduceScatter,
    ) -> Result<ReduceScatter, CommError> {
        let dtype = op.partial.dtype();
        let all = 0..op.partial.len().0;
        let shard = self.shard(op.partial.len(), self.rank());
        let elements = shard.start / dtype.size()..shard.end / dtype.size();
        let ReduceScatter { partial, target } = &mut op;
        let mut read = |own: &mut Region, peers: &dyn Peers| {
            let (sum, combine) = match target {
                ReduceTarget::InPlace => {
                    return self.sum_in_place(own, shard.clone(), dtype, peers);
                }
                ReduceTarget::Shard(buffer, combine) => (buffer.view_mut(), *combine),
                ReduceTarget::ShardOf(buffer) => {
                    (buffer.range_mut(elements.clone()), Combine::Assign)
                }
            };
            let own = View::of_bytes(&own.bytes()[shard.clone()], dtype);
            tree_sum(&self.inputs(own, peers, &shard), sum, combine);
        };
        self.transport.meet(operation, Offer::Range(partial.region_mut(), all), &mut read)?;
        self.count_collective(Bytes(shard.len()) * (self.world_size().get() - 1));
        Ok(op)
    }

    /// Sums over `shard` of this rank's own contribution, which no other rank reads.
    fn sum_in_place(&self, own: &mut Region, shard: Range<usize>, dtype: DType, peers: &dyn Peers) {
        let input = |rank| View::of_bytes(peers.bytes(rank, shard.clone()), dtype);
        let (before, after): (Vec<_>, Vec<_>) = self.others().partition(|rank| *rank < self.rank());
        let [before, after]: [Vec<_>; 2] =
            [before, after].map(|ranks| ranks.into_iter().map(input).collect());
        let target = ViewMut::of_bytes(own.range_mut(shard.clone()), dtype);
        tree_sum_in_place(&before, target, &after);
    }

    /// Sums over `shard` of every rank's contribution, which no other rank touches; a block at a
    /// time, so that the others' lines are still in the caches when the sum is written to them.
    fn sum_on_all(&self, own: &mut Region, shard: Range<usize>, dtype: DType, peers: &dyn Peers) {
        for start in shard.clone().step_by(SUMMED_AT_ONCE) {
            let block = start..shard.end.min(start + SUMMED_AT_ONCE);
            self.sum_in_place(own, block.clone(), dtype, peers);
            for rank in self.others() {
                peers.write(rank, block.clone(), own.range_mut(block.clone()));
            }
        }
    }

    /// Every rank's elements of `range`, in rank order.
    fn inputs<'a>(
        &self,
        own: View<'a>,
        peers: &'a dyn Peers,
        range: &Range<usize>,
    ) -> Vec<View<'a>> {
        let input = |rank| match rank == self.rank() {
            true => own,
            false => View::of_bytes(peers.bytes(rank, range.clone()), own.dtype()),
        };
        self.world_size().ranks().map(input).collect()
    }

    /// Copies every other rank's shard into `full`, but those that lie there already; returns how
    /// much was copied.
    fn gather(&self, full: &mut Region, peers: &dyn Peers) -> Bytes {
        let mut copied = Bytes(0);
        for rank in self.others() {
            let shard = self.shard(full.len(), rank);
            copied += copy(peers, rank, full, shard);
        }
        copied
    }

    /// Refuses to go on unless all ranks' pieces together are as long as `operation` says.
    fn check_pieces(&self, operation: &Operation, pieces: &Pieces<'_>) -> Result<(), CommError> {
        let size = operation.dtype.map_or(1, DType::size);
        let (count, ranks) = (pieces.own.len(), self.world_size().ranks());
        let len = |rank| (0..count).map(|index| pieces.get(rank, index).len()).sum();
        let lens: Vec<usize> = ranks.map(len).collect();
        if lens.iter().sum::<usize>() == operation.numel.0 * size {
            return Ok(());
        }
        let world = self.transport.members().ranks().iter().copied();
        Err(CommError::Unfilled {
            sequence: operation.sequence,
            wanted: operation.to_string(),
            offered: world.zip(lens.iter().map(|len| Numel(len / size))).collect(),
        })
    }

    /// Copies every rank's pieces to their places in `full`; returns how much was the others'.
    fn gather_pieces(&self, pieces: &Pieces<'_>, full: &mut Region) -> Bytes {
        let mut end = 0;
        for index in 0..pieces.own.len() {
            for rank in self.world_size().ranks() {
                let bytes = pieces.get(rank, index);
                kernels::copy(bytes, full.range_mut(end..end + bytes.len()));
                end += bytes.len();
            }
        }
        full.len() - Bytes(pieces.own.iter().map(|piece| piece.len()).sum())
    }
}

/// What the ranks offer to an all-gather of several shards.
struct Pieces<'a> {
    rank: Rank,
    own: &'a [&'a [u8]],
    peers: &'a dyn Peers,
}

impl Pieces<'_> {
    fn get(&self, rank: Rank, index: usize) -> &[u8] {
        match rank == self.rank {
            true => self.own[index],
            false => self.peers.piece(rank, index),
        }
    }
}

impl<T: Transport> Communicator for Group<T> {
    fn rank(&self) -> Rank {
        self.transport.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.transport.members().size()
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.transport.alloc(bytes)
    }

    fn alloc_scratch(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.transport.alloc_scratch(bytes)
    }

    fn alloc_replica(&self, bytes: Bytes) -> Result<Region, CommError> {
        let deed = |operation: &Operation| self.transport.alloc_replica(operation);
        self.run(Kind::AllocReplica, None, Numel(bytes.0), deed)
    }

    fn shares_replicas(&self) -> bool {
        self.transport.shares_replicas() && self.world_size() != WorldSize::ONE
    }

    fn reduce_scatter(&self, op: ReduceScatter) -> Result<Handle<ReduceScatter>, CommError> {
        check_reduce_scatter(&op, self.world_size())?;
        let (dtype, numel) = (op.partial.dtype(), op.partial.numel());
        let deed = |operation: &Operation| self.sum(operation, op);
        Ok(Handle::done(self.run(Kind::ReduceScatter, Some(dtype), numel, deed)))
    }

    fn all_reduce(&self, mut buffer: Buffer) -> Result<Handle<Buffer>, CommError> {
        if !self.transport.writes_to_peers() {
            return reduce_and_gather(self, buffer);
        }
        check_shards("all-reduce", buffer.numel(), self.world_size())?;
        let (dtype, numel) = (buffer.dtype(), buffer.numel());
        let deed = |operation: &Operation| {
            let shard = self.shard(buffer.len(), self.rank());
            let mut read = |own: &mut Region, peers: &dyn Peers| {
                self.sum_on_all(own, shard.clone(), dtype, peers);
            };
            self.transport.meet(operation, Offer::Shared(buffer.region_mut()), &mut read)?;
            // The others' parts of one shard come here, and their sums of the other shards.
            self.count_collective(Bytes(shard.len()) * (2 * (self.world_size().get() - 1)));
            Ok(buffer)
        };
        Ok(Handle::done(self.run(Kind::AllReduce, Some(dtype), numel, deed)))
    }

    fn all_gather(&self, mut full: Buffer) -> Result<Handle<Buffer>, CommError> {
        check_shards("all-gather", full.numel(), self.world_size())?;
        let (dtype, numel) = (full.dtype(), full.numel());
        let deed = |operation: &Operation| {
            let range = self.shard(full.len(), self.rank());
            let mut copied = Bytes(0);
            let mut read = |own: &mut Region, peers: &dyn Peers| copied = self.gather(own, peers);
            self.transport.meet(operation, Offer::Range(full.region_mut(), range), &mut read)?;
            self.count_collective(copied);
            Ok(full)
        };
        Ok(Handle::done(self.run(Kind::AllGather, Some(dtype), numel, deed)))
    }

    fn all_gather_into(
        &self,
        mut shard: Buffer,
        mut full: Buffer,
    ) -> Result<Handle<(Buffer, Buffer)>, CommError> {
        check_gather_into(&shard, &full, self.world_size())?;
        let (dtype, numel) = (full.dtype(), full.numel());
        let deed = |operation: &Operation| {
            let range = 0..shard.len().0;
            let target = self.shard(full.len(), self.rank());
            let mut copied = Bytes(0);
            let mut read = |own: &mut Region, peers: &dyn Peers| {
                kernels::copy(own.bytes(), full.region_mut().range_mut(target.clone()));
                copied = self.gather(full.region_mut(), peers);
            };
            self.transport.meet(operation, Offer::Range(shard.region_mut(), range), &mut read)?;
            self.count_collective(copied);
            Ok((shard, full))
        };
        Ok(Handle::done(self.run(Kind::AllGather, Some(dtype), numel, deed)))
    }

    fn all_gather_many(
        &self,
        shards: Vec<OwnShard>,
        mut full: Buffer,
    ) -> Result<Handle<(Vec<OwnShard>, Buffer)>, CommError> {
        check_gather_many(&shards, &full)?;
        let kind = Kind::AllGatherMany { shards: shards.len() };
        let (dtype, numel) = (full.dtype(), full.numel());
        let deed = |operation: &Operation| {
            let own: Vec<&[u8]> = shards.iter().map(|shard| shard.view().bytes()).collect();
            let mut copied = Ok(Bytes(0));
            let mut read = |_: &mut Region, peers: &dyn Peers| {
                let pieces = Pieces { rank: self.rank(), own: &own, peers };
                copied = self
                    .check_pieces(operation, &pieces)
                    .map(|()| self.gather_pieces(&pieces, full.region_mut()));
            };
            self.transport.meet(operation, Offer::Pieces(&own), &mut read)?;
            self.count_collective(copied?);
            Ok((shards, full))
        };
        Ok(Handle::done(self.run(kind, Some(dtype), numel, deed)))
    }

    fn peer_views(&self, shards: Vec<OwnShard>, dtype: DType) -> Result<PeerViews, CommError> {
        let Some(lender) = self.transport.lender() else {
            return peer_views::copied(self, shards, dtype);
        };
        peer_views::check(&shards, dtype)?;
        if !shards.iter().all(|shard| lender.reaches(shard.view().bytes())) {
            let problem = "a shard does not lie in memory of alloc(); only that can be lent";
            return Err(misuse("peer views", problem.into()));
        }
        let kind = Kind::PeerViews { shards: shards.len() };
        self.run(kind, Some(dtype), Numel(0), |operation| {
            let own: Vec<&[u8]> = shards.iter().map(|shard| shard.view().bytes()).collect();
            let lent = lender.lend(operation, &own)?;
            self.count_collective(Bytes(0));
            Ok(PeerViews::in_place(self.rank(), dtype, shards, lent))
        })
    }

    fn end_peer_views(&self, views: PeerViews) -> Result<Vec<OwnShard>, CommError> {
        if views.is_copy() {
            return Ok(views.into_own());
        }
        self.run(Kind::EndPeerViews, None, Numel(0), |operation| {
            self.transport.meet(operation, Offer::Pieces(&[]), &mut |_, _| {})?;
            lock(&self.traffic).exchanges += 1;
            Ok(views.into_own())
        })
    }

    fn broadcast(&self, mut buffer: Buffer, root: Rank) -> Result<Handle<Buffer>, CommError> {
        check_root(root, self.world_size())?;
        let (dtype, numel) = (buffer.dtype(), buffer.numel());
        let deed = |operation: &Operation| {
            let all = 0..buffer.len().0;
            let range = if root == self.rank() { all.clone() } else { 0..0 };
            let mut copied = Bytes(0);
            let mut read = |own: &mut Region, peers: &dyn Peers| {
                if root != self.rank() {
                    copied = copy(peers, root, own, all.clone());
                }
            };
            self.transport.meet(operation, Offer::Range(buffer.region_mut(), range), &mut read)?;
            self.count_collective(copied);
            Ok(buffer)
        };
        Ok(Handle::done(self.run(Kind::Broadcast { root }, Some(dtype), numel, deed)))
    }

    fn exchange(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let kind = Kind::Exchange { label: Label::new(label) };
        self.run(kind, None, Numel(bytes.len()), |operation| {
            let mut all = vec![bytes.to_vec(); self.world_size().get()];
            let mut read = |_: &mut Region, peers: &dyn Peers| {
                for rank in self.others() {
                    all[rank.0].copy_from_slice(peers.piece(rank, 0));
                }
            };
            self.transport.meet(operation, Offer::Pieces(&[bytes]), &mut read)?;
            lock(&self.traffic).exchanges += 1;
            Ok(all)
        })
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.run(Kind::Barrier, None, Numel(0), |operation| {
            self.transport.meet(operation, Offer::Pieces(&[]), &mut |_, _| {})?;
            lock(&self.traffic).exchanges += 1;
            Ok(())
        })
    }

    fn split(&self, group: &ProcessGroup) -> Result<Box<dyn Communicator>, CommError> {
        let members = self.transport.members();
        let me = members.ranks()[self.rank().0];
        if group.rank_of(me).is_none() {
            return Err(CommError::NotInGroup { rank: me, group: group.clone() });
        }
        if let Some(outsider) = group.ranks().iter().find(|rank| members.rank_of(**rank).is_none())
        {
            let problem = format!("rank {outsider} is not in the group that is split");
            return Err(misuse("split", problem));
        }
        let mut calls = self.calls()?;
        let split = self.settle(&mut calls, self.transport.split(group))?;
        let split = Self::new(split);
        let numel = Operation::split(group).numel;
        split.run(Kind::Split, None, numel, |operation| {
            split.transport.meet(operation, Offer::Pieces(&[]), &mut |_, _| {})
        })?;
        Ok(Box::new(split))
    }

    fn abort(&self, why: &str) {
        self.transport.abort(why);
    }

    fn traffic(&self) -> Traffic {
        *lock(&self.traffic)
    }

    fn allocated(&self) -> Allocated {
        self.transport.allocated()
    }
}

/// An all-reduce of two steps, for those who cannot write to each other's memory.
pub(crate) fn reduce_and_gather<C: Communicator + ?Sized>(
    comm: &C,
    buffer: Buffer,
) -> Result<Handle<Buffer>, CommError> {
    let op = ReduceScatter { partial: buffer, target: ReduceTarget::InPlace };
    let summed = comm.reduce_scatter(op)?.wait()?;
    comm.all_gather(summed.partial)
}

/// Copies what `rank` offers over `range` of `target`, unless it lies there; returns how much.
fn copy(peers: &dyn Peers, rank: Rank, target: &mut Region, range: Range<usize>) -> Bytes {
    if range.is_empty() || peers.lies_at(rank, target.start().addr().get() + range.start) {
        return Bytes(0);
    }
    kernels::copy(peers.bytes(rank, 0..range.len()), target.range_mut(range.clone()));
    Bytes(range.len())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
