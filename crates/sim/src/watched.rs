//! A communicator that counts, delays and dies, around one that works.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use oxizero_comm::{
    Allocated, CommError, Communicator, Handle, OwnShard, PeerViews, ReduceScatter, Traffic,
};
use oxizero_core::{Bytes, DType, Overlap, ProcessGroup, Random, Rank, WorldSize};
use oxizero_device::{Buffer, Region};

/// What is done to the ranks of a world.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Delays before operations.
    pub delays: Option<Delays>,
    /// A rank that dies.
    pub death: Option<Death>,
    /// Whether each rank's operations run on a thread of their own: there they are delayed, and
    /// there a rank dies.
    pub overlap: Overlap,
}

/// Delays before every operation of every rank, drawn uniformly and repeatably.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delays {
    /// Delays depend on the seed, the rank and the operation's place in its order.
    pub seed: u64,
    /// The longest.
    pub max: Duration,
}

/// A rank that dies instead of performing an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The rank.
    pub rank: Rank,
    /// The operation's place in that rank's order, counted from 0.
    pub operation: usize,
}

/// What a rank asked for, one entry an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`Communicator::alloc_replica`].
    AllocReplica,
    /// [`Communicator::reduce_scatter`].
    ReduceScatter,
    /// [`Communicator::all_gather`] and [`Communicator::all_gather_into`].
    AllGather,
    /// [`Communicator::peer_views`].
    PeerViews,
    /// [`Communicator::broadcast`].
    Broadcast,
    /// [`Communicator::exchange`].
    Exchange,
    /// [`Communicator::barrier`].
    Barrier,
    /// [`Communicator::split`].
    Split,
}

/// A rank's operations so far; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<Kind>>>);

impl Log {
    /// Every operation, in order.
    pub fn operations(&self) -> Vec<Kind> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many operations of this kind there were.
    pub fn count(&self, kind: Kind) -> usize {
        self.operations().iter().filter(|operation| **operation == kind).count()
    }

    /// Adds an operation, and returns its place.
    fn add(&self, kind: Kind) -> usize {
        let mut operations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        operations.push(kind);
        operations.len() - 1
    }
}

/// A communicator under a [`Plan`]; otherwise it does what the one inside does. Those that are
/// split from it are watched too: a rank has one order of operations, whichever group they are of.
pub struct Watched {
    rank: Rank,
    world_size: WorldSize,
    /// The rank in the world.
    world_rank: Rank,
    plan: Plan,
    log: Log,
    /// The communicators of this rank, and which is the one inside. They are gone once the rank has
    /// died: dropping them is how the others learn of it.
    alive: Alive,
    index: usize,
}

type Alive = Arc<Mutex<Vec<Arc<dyn Communicator>>>>;

impl Watched {
    /// Watches `comm`, that of the world.
    pub fn new(comm: Box<dyn Communicator>, plan: Plan) -> Self {
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let alive = Arc::new(Mutex::new(vec![Arc::from(comm)]));
        let log = Log::default();
        Self { rank, world_size, world_rank: rank, plan, log, alive, index: 0 }
    }

    /// What this rank asks for, now and later.
    pub fn log(&self) -> Log {
        self.log.clone()
    }

    /// Counts the operation, waits as planned, and dies as planned.
    fn enter(&self, kind: Kind) -> Result<Arc<dyn Communicator>, CommError> {
        let operation = self.log.add(kind);
        if self.plan.death == Some(Death { rank: self.world_rank, operation }) {
            self.alive.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
        if let Some(Delays { seed, max }) = self.plan.delays {
            let path = [self.world_rank.0 as u64, operation as u64];
            thread::sleep(max.mul_f32(Random::for_path(seed, &path).uniform()));
        }
        self.inner()
    }

    fn inner(&self) -> Result<Arc<dyn Communicator>, CommError> {
        let alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner);
        alive.get(self.index).cloned().ok_or_else(|| CommError::System {
            operation: "a rank of the simulated world",
            why: format!("rank {} has died, as planned", self.world_rank),
        })
    }
}

impl Communicator for Watched {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn world_size(&self) -> WorldSize {
        self.world_size
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.inner()?.alloc(bytes)
    }

    fn alloc_replica(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.enter(Kind::AllocReplica)?.alloc_replica(bytes)
    }

    fn shares_replicas(&self) -> bool {
        self.inner().is_ok_and(|inner| inner.shares_replicas())
    }

    fn scratch(&self) -> Bytes {
        self.inner().map(|inner| inner.scratch()).unwrap_or_default()
    }

    fn reduce_scatter(&self, op: ReduceScatter) -> Result<Handle<ReduceScatter>, CommError> {
        self.enter(Kind::ReduceScatter)?.reduce_scatter(op)
    }

    fn all_gather(&self, full: Buffer) -> Result<Handle<Buffer>, CommError> {
        self.enter(Kind::AllGather)?.all_gather(full)
    }

    fn all_gather_into(
        &self,
        shard: Buffer,
        full: Buffer,
    ) -> Result<Handle<(Buffer, Buffer)>, CommError> {
        self.enter(Kind::AllGather)?.all_gather_into(shard, full)
    }

    fn all_gather_many(
        &self,
        shards: Vec<OwnShard>,
        full: Buffer,
    ) -> Result<Handle<(Vec<OwnShard>, Buffer)>, CommError> {
        self.enter(Kind::AllGather)?.all_gather_many(shards, full)
    }

    fn peer_views(&self, shards: Vec<OwnShard>, dtype: DType) -> Result<PeerViews, CommError> {
        self.enter(Kind::PeerViews)?.peer_views(shards, dtype)
    }

    fn end_peer_views(&self, views: PeerViews) -> Result<Vec<OwnShard>, CommError> {
        self.enter(Kind::Barrier)?.end_peer_views(views)
    }

    fn broadcast(&self, buffer: Buffer, root: Rank) -> Result<Handle<Buffer>, CommError> {
        self.enter(Kind::Broadcast)?.broadcast(buffer, root)
    }

    fn exchange(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.enter(Kind::Exchange)?.exchange(label, bytes)
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.enter(Kind::Barrier)?.barrier()
    }

    fn split(&self, group: &ProcessGroup) -> Result<Box<dyn Communicator>, CommError> {
        let comm = self.enter(Kind::Split)?.split(group)?;
        let (rank, world_size, world_rank) = (comm.rank(), comm.world_size(), self.world_rank);
        let (plan, log, alive) = (self.plan, self.log.clone(), self.alive.clone());
        let mut all = alive.lock().unwrap_or_else(PoisonError::into_inner);
        let index = all.len();
        all.push(Arc::from(comm));
        drop(all);
        Ok(Box::new(Self { rank, world_size, world_rank, plan, log, alive, index }))
    }

    fn abort(&self, why: &str) {
        if let Ok(inner) = self.inner() {
            inner.abort(why);
        }
    }

    fn traffic(&self) -> Traffic {
        self.inner().map(|inner| inner.traffic()).unwrap_or_default()
    }

    fn allocated(&self) -> Allocated {
        self.inner().map(|inner| inner.allocated()).unwrap_or_default()
    }
}
