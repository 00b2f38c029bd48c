//! The collectives over a [`Library`].

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank, WorldSize};
use oxizero_device::kernels::{Combine, cast, tree_sum};
use oxizero_device::{Buffer, Region};

use super::packed::Streams;
use super::{Library, LibraryError};
use crate::checks::{
    check_gather_into, check_gather_many, check_reduce_scatter, check_root, check_shards,
};
use crate::error::KnownTo;
use crate::operation::{Kind, Label, Operation, WORDS};
use crate::{
    Allocated, CommError, Communicator, Handle, OwnShard, ReduceScatter, ReduceTarget, Traffic,
    numbers,
};

/// One rank's communicator.
pub(super) struct Group<L> {
    /// This rank's end of it in the library.
    end: L,
    /// The operations so far. Held during one, so that one rank's threads cannot mix theirs.
    calls: Mutex<u64>,
    /// What the first failure was. Not held during an operation, which an abort is to end.
    failure: Mutex<Option<CommError>>,
    traffic: Mutex<Traffic>,
}

/// What ranks tell each other before an operation: what it is, and the first bytes of an exchange.
const MESSAGE: usize = 168;
/// Bytes of it that say what the operation is.
const HEADER: usize = WORDS * size_of::<u64>();

impl<L: Library> Group<L> {
    pub(super) fn new(end: L) -> Self {
        let (calls, failure, traffic) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { end, calls, failure, traffic }
    }

    fn is_alone(&self) -> bool {
        self.world_size() == WorldSize::ONE
    }

    /// Runs the group's next operation; an error is final.
    fn run<R>(
        &self,
        kind: Kind,
        dtype: Option<DType>,
        numel: Numel,
        deed: impl FnOnce(&Operation) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let mut calls = lock(&self.calls);
        if let Some(failure) = &*lock(&self.failure) {
            return Err(failure.clone());
        }
        *calls += 1;
        let operation = Operation { sequence: *calls, kind, dtype, numel };
        deed(&operation).map_err(|error| {
            // Where another thread has given up, that is why the operation failed.
            let first = lock(&self.failure).get_or_insert(error.clone()).clone();
            if matches!(first.known_to(), KnownTo::Rank | KnownTo::Group) {
                self.end.abort(&first.to_string());
            }
            first
        })
    }

    /// Compares the operation across ranks. Returns the first of each rank's `bytes`.
    fn agree(&self, operation: &Operation, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut message = [0; MESSAGE];
        for (target, word) in message.chunks_exact_mut(8).zip(operation.to_words()) {
            target.copy_from_slice(&word.to_le_bytes());
        }
        message[HEADER..HEADER + bytes.len()].copy_from_slice(bytes);
        let told = self.end.exchange(&message);
        let told = told.map_err(|error| self.error(error, operation))?;
        let of = |message: &Vec<u8>| {
            let mut words = words(message);
            Operation::from_words(std::array::from_fn(|_| words.next().expect("a whole message")))
        };
        let ranks = self.end.members().ranks();
        operation.agree(self.me(), ranks.iter().copied().zip(told.iter().map(of)))?;
        Ok(told.into_iter().map(|message| message[HEADER..HEADER + bytes.len()].to_vec()).collect())
    }

    /// The same, and all of each rank's `bytes`, equally many on each.
    fn tell(&self, operation: &Operation, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        if self.is_alone() {
            return Ok(vec![bytes.to_vec()]);
        }
        let (first, rest) = bytes.split_at(bytes.len().min(MESSAGE - HEADER));
        let mut told = self.agree(operation, first)?;
        if !rest.is_empty() {
            let rests = self.end.exchange(rest);
            let rests = rests.map_err(|error| self.error(error, operation))?;
            told.iter_mut().zip(rests).for_each(|(bytes, rest)| bytes.extend(rest));
        }
        Ok(told)
    }

    /// This rank's number in the world.
    fn me(&self) -> Rank {
        self.end.members().ranks()[self.end.rank().0]
    }

    fn error(&self, error: LibraryError, operation: &Operation) -> CommError {
        let during = operation.to_string();
        match error {
            LibraryError::Dead(rank) => CommError::PeerDead { rank, during },
            LibraryError::Late(rank) => {
                let (waiter, deadline) = (self.me(), self.end.deadline());
                CommError::Timeout { rank, waiter, during, deadline, waits: None }
            }
            LibraryError::Aborted(rank, why) => CommError::Aborted { rank, why },
            LibraryError::Failed(why) => {
                CommError::System { operation: self.end.name(), why: format!("{during}: {why}") }
            }
        }
    }

    /// An operation of two steps: ranks compare it, and then the library moves data.
    fn moves<R>(
        &self,
        operation: &Operation,
        deed: impl FnOnce() -> Result<R, LibraryError>,
    ) -> Result<R, CommError> {
        self.agree(operation, &[])?;
        deed().map_err(|error| self.error(error, operation))
    }

    fn count_collective(&self, bytes: Bytes) {
        let mut traffic = lock(&self.traffic);
        traffic.collectives += 1;
        traffic.bytes += bytes;
    }

    /// The elements of this rank's shard of so many.
    fn shard(&self, numel: Numel) -> Range<usize> {
        let shard = numel.0 / self.world_size().get();
        let rank = self.rank().0;
        rank * shard..(rank + 1) * shard
    }

    /// What the others send of a buffer of which each rank holds a shard.
    fn others(&self, full: Bytes) -> Bytes {
        Bytes(full.0 / self.world_size().get() * (self.world_size().get() - 1))
    }

    fn sum(
        &self,
        operation: &Operation,
        mut op: ReduceScatter,
    ) -> Result<ReduceScatter, CommError> {
        if self.is_alone() {
            match &mut op.target {
                ReduceTarget::InPlace => {}
                ReduceTarget::Shard(buffer, combine) => {
                    tree_sum(&[op.partial.view()], buffer.view_mut(), *combine);
                }
                ReduceTarget::ShardOf(buffer) => {
                    tree_sum(&[op.partial.view()], buffer.view_mut(), Combine::Assign);
                }
            }
        } else {
            self.agree(operation, &[])?;
            self.sum_pieces(operation, &mut op)?;
        }
        self.count_collective(self.others(op.partial.len()));
        Ok(op)
    }

    /// Sums every rank's contribution to this rank's shard, a piece of all shards at a time.
    fn sum_pieces(&self, operation: &Operation, op: &mut ReduceScatter) -> Result<(), CommError> {
        let (ranks, dtype) = (self.world_size().get(), op.partial.dtype());
        let shard = self.shard(op.partial.numel());
        let scratch = self.end.scratch();
        let most = match op.partial.len() <= scratch {
            true => shard.len(),
            // What is sent is put side by side, and what is received takes as much again.
            false => scratch.numel(dtype).0 / 2 / ranks,
        };
        let len = shard.len().min(most).max(1);
        let mut received = self.buffer(Numel(len.min(shard.len()) * ranks), dtype)?;
        for start in (0..shard.len()).step_by(len) {
            let piece = start..shard.len().min(start + len);
            let target = received.range_mut(0..piece.len() * ranks);
            let moved = self.end.all_to_all(op.partial.view(), piece.clone(), target);
            moved.map_err(|error| self.error(error, operation))?;
            let of = |rank: Rank| received.range(rank.0 * piece.len()..(rank.0 + 1) * piece.len());
            let inputs: Vec<_> = self.world_size().ranks().map(of).collect();
            let in_full = shard.start + piece.start..shard.start + piece.end;
            let (sum, combine) = match &mut op.target {
                ReduceTarget::InPlace => (op.partial.range_mut(in_full), Combine::Assign),
                ReduceTarget::Shard(buffer, combine) => (buffer.range_mut(piece.clone()), *combine),
                ReduceTarget::ShardOf(buffer) => (buffer.range_mut(in_full), Combine::Assign),
            };
            tree_sum(&inputs, sum, combine);
        }
        Ok(())
    }

    fn gather_many(
        &self,
        operation: &Operation,
        shards: &[OwnShard],
        full: &mut Buffer,
    ) -> Result<(), CommError> {
        let own = numbers::to_bytes(shards.iter().map(|shard| shard.own.len()));
        let told = self.tell(operation, &own)?;
        let lengths: Vec<_> = told.iter().map(|bytes| numbers::from_bytes(bytes)).collect();
        let streams = Streams::new(&lengths);
        if streams.full() != full.numel() {
            let (world, ranks) = (self.end.members().ranks(), self.world_size().ranks());
            let offered = world.iter().copied().zip(ranks.map(|rank| streams.numel(rank)));
            return Err(CommError::Unfilled {
                sequence: operation.sequence,
                wanted: operation.to_string(),
                offered: offered.collect(),
            });
        }
        match shards {
            _ if self.is_alone() => {
                for stretch in streams.stretches(Rank(0), 0..streams.longest()) {
                    cast(shards[stretch.place].view(), full.range_mut(stretch.in_full));
                }
                Ok(())
            }
            [shard] if streams.are_even() => {
                let gathered = self.end.all_gather(Some(shard.view()), full.view_mut());
                gathered.map_err(|error| self.error(error, operation))
            }
            _ => self.gather_pieces(operation, (shards, &streams), full),
        }
    }

    /// Gathers what lies in several places, a piece of all ranks' streams at a time.
    fn gather_pieces(
        &self,
        operation: &Operation,
        (shards, streams): (&[OwnShard], &Streams),
        full: &mut Buffer,
    ) -> Result<(), CommError> {
        let (ranks, dtype) = (self.world_size().get(), full.dtype());
        let most = self.end.scratch().numel(dtype).0 / (ranks + 1);
        let (longest, len) = (streams.longest(), streams.longest().min(most).max(1));
        let mut sent = self.buffer(Numel(len), dtype)?;
        let mut received = self.buffer(Numel(len * ranks), dtype)?;
        for start in (0..longest).step_by(len) {
            let piece = start..longest.min(start + len);
            for stretch in streams.stretches(self.rank(), piece.clone()) {
                let own = shards[stretch.place].view().range(stretch.in_shard);
                cast(own, sent.range_mut(stretch.in_piece));
            }
            let own = Some(sent.range(0..piece.len()));
            let gathered = self.end.all_gather(own, received.range_mut(0..piece.len() * ranks));
            gathered.map_err(|error| self.error(error, operation))?;
            for rank in self.world_size().ranks() {
                let of_rank = received.range(rank.0 * piece.len()..(rank.0 + 1) * piece.len());
                for stretch in streams.stretches(rank, piece.clone()) {
                    cast(of_rank.range(stretch.in_piece), full.range_mut(stretch.in_full));
                }
            }
        }
        Ok(())
    }

    fn buffer(&self, numel: Numel, dtype: DType) -> Result<Buffer, CommError> {
        Ok(Buffer::new(self.alloc(numel.bytes(dtype))?, dtype))
    }
}

impl<L: Library> Communicator for Group<L> {
    fn rank(&self) -> Rank {
        self.end.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.end.members().size()
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        let why =
            |error: LibraryError| CommError::System { operation: "alloc", why: error.to_string() };
        self.end.alloc(bytes).map_err(why)
    }

    fn alloc_replica(&self, bytes: Bytes) -> Result<Region, CommError> {
        if !self.is_alone() {
            let deed = |operation: &Operation| self.agree(operation, &[]).map(drop);
            self.run(Kind::AllocReplica, None, Numel(bytes.0), deed)?;
        }
        self.alloc(bytes)
    }

    fn shares_replicas(&self) -> bool {
        false
    }

    fn scratch(&self) -> Bytes {
        if self.is_alone() { Bytes(0) } else { self.end.scratch() }
    }

    fn reduce_scatter(&self, op: ReduceScatter) -> Result<Handle<ReduceScatter>, CommError> {
        check_reduce_scatter(&op, self.world_size())?;
        let (dtype, numel) = (op.partial.dtype(), op.partial.numel());
        let deed = |operation: &Operation| self.sum(operation, op);
        Ok(Handle::done(self.run(Kind::ReduceScatter, Some(dtype), numel, deed)))
    }

    fn all_gather(&self, mut full: Buffer) -> Result<Handle<Buffer>, CommError> {
        check_shards("all-gather", full.numel(), self.world_size())?;
        let (dtype, numel) = (full.dtype(), full.numel());
        let deed = |operation: &Operation| {
            if !self.is_alone() {
                self.moves(operation, || self.end.all_gather(None, full.view_mut()))?;
            }
            self.count_collective(self.others(full.len()));
            Ok(full)
        };
        Ok(Handle::done(self.run(Kind::AllGather, Some(dtype), numel, deed)))
    }

    fn all_gather_into(
        &self,
        shard: Buffer,
        mut full: Buffer,
    ) -> Result<Handle<(Buffer, Buffer)>, CommError> {
        check_gather_into(&shard, &full, self.world_size())?;
        let (dtype, numel) = (full.dtype(), full.numel());
        let deed = |operation: &Operation| {
            if self.is_alone() {
                cast(shard.view(), full.view_mut());
            } else {
                let own = Some(shard.view());
                self.moves(operation, || self.end.all_gather(own, full.view_mut()))?;
            }
            self.count_collective(self.others(full.len()));
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
            self.gather_many(operation, &shards, &mut full)?;
            let own: Numel = shards.iter().map(|shard| Numel(shard.own.len())).sum();
            self.count_collective(full.len() - own.bytes(dtype));
            Ok((shards, full))
        };
        Ok(Handle::done(self.run(kind, Some(dtype), numel, deed)))
    }

    fn broadcast(&self, mut buffer: Buffer, root: Rank) -> Result<Handle<Buffer>, CommError> {
        check_root(root, self.world_size())?;
        let (dtype, numel) = (buffer.dtype(), buffer.numel());
        let deed = |operation: &Operation| {
            if !self.is_alone() {
                self.moves(operation, || self.end.broadcast(buffer.view_mut(), root))?;
            }
            let own = root == self.rank();
            self.count_collective(if own { Bytes(0) } else { buffer.len() });
            Ok(buffer)
        };
        Ok(Handle::done(self.run(Kind::Broadcast { root }, Some(dtype), numel, deed)))
    }

    fn exchange(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        lock(&self.traffic).exchanges += 1;
        let kind = Kind::Exchange { label: Label::new(label) };
        self.run(kind, None, Numel(bytes.len()), |operation| self.tell(operation, bytes))
    }

    fn barrier(&self) -> Result<(), CommError> {
        lock(&self.traffic).exchanges += 1;
        self.run(Kind::Barrier, None, Numel(0), |operation| self.tell(operation, &[]).map(drop))
    }

    fn split(&self, group: &ProcessGroup) -> Result<Box<dyn Communicator>, CommError> {
        let me = self.me();
        if group.rank_of(me).is_none() {
            return Err(CommError::NotInGroup { rank: me, group: group.clone() });
        }
        let operation = Operation::split(group);
        let split = self.end.split(group);
        let split = Self::new(split.map_err(|error| self.error(error, &operation))?);
        if !split.is_alone() {
            let deed = |operation: &Operation| split.agree(operation, &[]).map(drop);
            split.run(operation.kind, None, operation.numel, deed)?;
        }
        Ok(Box::new(split))
    }

    fn abort(&self, why: &str) {
        let aborted = CommError::Aborted { rank: self.me(), why: why.to_owned() };
        lock(&self.failure).get_or_insert(aborted);
        self.end.abort(why);
    }

    fn traffic(&self) -> Traffic {
        *lock(&self.traffic)
    }

    fn allocated(&self) -> Allocated {
        Allocated::default()
    }
}

/// What bytes say as numbers of 64 bits.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes each"));
    bytes.chunks_exact(8).map(word)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
