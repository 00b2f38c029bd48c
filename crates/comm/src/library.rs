//! Back ends whose library brings its own collectives, such as `torch.distributed` or MPI.
//!
//! The library moves bytes, wherever they lie. What a collective is to the engine is decided here:
//! who calls what is compared before data is touched, and sums over ranks are made by the kernels,
//! in f32 and in rank order, never by the library. A reduce-scatter is an exchange of shards, and
//! then a sum: while it runs, as much memory as the partial buffer holds what was received.
//!
//! To compare, ranks tell each other 128 bytes before each operation. The bytes of a small
//! exchange travel with them.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oxizero_core::{Bytes, DType, Numel, ProcessGroup, Rank, WorldSize};
use oxizero_device::kernels::{Combine, tree_sum};
use oxizero_device::{Buffer, Region, View, ViewMut};

use crate::error::KnownTo;
use crate::group::{check_gather_into, check_reduce_scatter, check_shards, misuse};
use crate::operation::{Kind, Operation};
use crate::{Allocated, CommError, Communicator, Handle, ReduceScatter, ReduceTarget, Traffic};

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

    /// Zeroed memory of this rank's own.
    fn alloc(&self, bytes: Bytes) -> Result<Region, LibraryError>;

    /// Every member's `bytes` of the host, equally many on each, in their order.
    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, LibraryError>;

    /// Gives each member its equal part of `source`, and fills `target` with what the members have
    /// for this rank, in their order.
    fn all_to_all(&self, source: View<'_>, target: ViewMut<'_>) -> Result<(), LibraryError>;

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LibraryError {
    /// A rank is gone.
    Dead(Rank),
    /// A rank did not come within the deadline.
    Late(Rank),
    /// A rank gave up, and said why.
    Aborted(Rank, String),
    /// The library's own words, where they do not tell whose fault it is.
    Failed(String),
}

/// The communicator of one rank's end of a group.
pub fn communicator(library: impl Library) -> Box<dyn Communicator> {
    Box::new(Group::new(library))
}

struct Group<L> {
    library: L,
    /// The operations so far. Held during one, so that one rank's threads cannot mix theirs.
    calls: Mutex<u64>,
    /// What the first failure was. Not held during an operation, which an abort is to end.
    failure: Mutex<Option<CommError>>,
    traffic: Mutex<Traffic>,
}

/// What ranks tell each other before an operation: what it is, and the first bytes of an exchange.
const MESSAGE: usize = 128;
const WORDS: usize = 3 * size_of::<u64>();

impl<L: Library> Group<L> {
    fn new(library: L) -> Self {
        let (calls, failure, traffic) = (Mutex::default(), Mutex::default(), Mutex::default());
        Self { library, calls, failure, traffic }
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
                self.library.abort(&first.to_string());
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
        message[WORDS..WORDS + bytes.len()].copy_from_slice(bytes);
        let told = self.library.exchange(&message);
        let told = told.map_err(|error| self.error(error, operation))?;
        let word = |message: &[u8], index: usize| {
            let bytes = &message[8 * index..8 * (index + 1)];
            u64::from_le_bytes(bytes.try_into().expect("a slice of eight bytes"))
        };
        let of = |message: &Vec<u8>| Operation::from_words([0, 1, 2].map(|i| word(message, i)));
        let ranks = self.library.members().ranks();
        operation.agree(self.me(), ranks.iter().copied().zip(told.iter().map(of)))?;
        Ok(told.into_iter().map(|message| message[WORDS..WORDS + bytes.len()].to_vec()).collect())
    }

    /// This rank's number in the world.
    fn me(&self) -> Rank {
        self.library.members().ranks()[self.library.rank().0]
    }

    fn error(&self, error: LibraryError, operation: &Operation) -> CommError {
        let during = operation.to_string();
        match error {
            LibraryError::Dead(rank) => CommError::PeerDead { rank, during },
            LibraryError::Late(rank) => {
                let (waiter, deadline) = (self.me(), self.library.deadline());
                CommError::Timeout { rank, waiter, during, deadline, waits: None }
            }
            LibraryError::Aborted(rank, why) => CommError::Aborted { rank, why },
            LibraryError::Failed(why) => CommError::System {
                operation: self.library.name(),
                why: format!("{during}: {why}"),
            },
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
        let (numel, dtype) = (op.partial.numel(), op.partial.dtype());
        let shard = self.shard(numel);
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
            let mut received = self.buffer(numel, dtype)?;
            self.moves(operation, || {
                self.library.all_to_all(op.partial.view(), received.view_mut())
            })?;
            let of = |rank: Rank| received.range(rank.0 * shard.len()..(rank.0 + 1) * shard.len());
            let inputs: Vec<_> = self.world_size().ranks().map(of).collect();
            let (sum, combine) = match &mut op.target {
                ReduceTarget::InPlace => (op.partial.range_mut(shard), Combine::Assign),
                ReduceTarget::Shard(buffer, combine) => (buffer.view_mut(), *combine),
                ReduceTarget::ShardOf(buffer) => (buffer.range_mut(shard), Combine::Assign),
            };
            tree_sum(&inputs, sum, combine);
        }
        self.count_collective(self.others(op.partial.len()));
        Ok(op)
    }

    fn buffer(&self, numel: Numel, dtype: DType) -> Result<Buffer, CommError> {
        Ok(Buffer::new(self.alloc(numel.bytes(dtype))?, dtype))
    }
}

impl<L: Library> Communicator for Group<L> {
    fn rank(&self) -> Rank {
        self.library.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.library.members().size()
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        let why = |error| CommError::System { operation: "alloc", why: format!("{error:?}") };
        self.library.alloc(bytes).map_err(why)
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
                self.moves(operation, || self.library.all_gather(None, full.view_mut()))?;
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
                oxizero_device::kernels::cast(shard.view(), full.view_mut());
            } else {
                let own = Some(shard.view());
                self.moves(operation, || self.library.all_gather(own, full.view_mut()))?;
            }
            self.count_collective(self.others(full.len()));
            Ok((shard, full))
        };
        Ok(Handle::done(self.run(Kind::AllGather, Some(dtype), numel, deed)))
    }

    fn broadcast(&self, mut buffer: Buffer, root: Rank) -> Result<Handle<Buffer>, CommError> {
        if root.0 >= self.world_size().get() {
            return Err(misuse("broadcast", format!("no rank {root} of {}", self.world_size())));
        }
        let (dtype, numel) = (buffer.dtype(), buffer.numel());
        let deed = |operation: &Operation| {
            if !self.is_alone() {
                self.moves(operation, || self.library.broadcast(buffer.view_mut(), root))?;
            }
            let own = root == self.rank();
            self.count_collective(if own { Bytes(0) } else { buffer.len() });
            Ok(buffer)
        };
        Ok(Handle::done(self.run(Kind::Broadcast { root }, Some(dtype), numel, deed)))
    }

    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        lock(&self.traffic).exchanges += 1;
        if self.is_alone() {
            return Ok(vec![bytes.to_vec()]);
        }
        self.run(Kind::Exchange, None, Numel(bytes.len()), |operation| {
            let (first, rest) = bytes.split_at(bytes.len().min(MESSAGE - WORDS));
            let mut told = self.agree(operation, first)?;
            if !rest.is_empty() {
                let rests = self.library.exchange(rest);
                let rests = rests.map_err(|error| self.error(error, operation))?;
                told.iter_mut().zip(rests).for_each(|(bytes, rest)| bytes.extend(rest));
            }
            Ok(told)
        })
    }

    fn barrier(&self) -> Result<(), CommError> {
        lock(&self.traffic).exchanges += 1;
        if self.is_alone() {
            return Ok(());
        }
        let deed = |operation: &Operation| self.agree(operation, &[]).map(drop);
        self.run(Kind::Barrier, None, Numel(0), deed)
    }

    fn split(&self, group: &ProcessGroup) -> Result<Box<dyn Communicator>, CommError> {
        let me = self.me();
        if group.rank_of(me).is_none() {
            return Err(CommError::NotInGroup { rank: me, group: group.clone() });
        }
        let operation = Operation::split(group);
        let split = self.library.split(group);
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
        self.library.abort(why);
    }

    fn traffic(&self) -> Traffic {
        *lock(&self.traffic)
    }

    fn allocated(&self) -> Allocated {
        Allocated::default()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
