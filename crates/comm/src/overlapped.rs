//! A communicator whose operations run beside the thread that asks for them.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::thread::available_parallelism;

use oxizero_core::{Bytes, DType, Overlap, ProcessGroup, Rank, WorldSize};
use oxizero_device::{Buffer, Region};

use crate::checks::{
    check_gather_into, check_gather_many, check_reduce_scatter, check_root, check_shards,
};
use crate::queue::Queue;
use crate::streams::Streams;
use crate::{
    Allocated, CommError, Communicator, Handle, OwnShard, PeerViews, ReduceScatter, Traffic,
};

/// Runs the operations of `comm`, and of every group that is split from it, on one thread of their
/// own, in the order in which they are issued. Handles are pending, and waiting for one blocks.
///
/// Calls that return more than a handle wait for all that was issued before; `alloc` and `abort`
/// wait for nothing. All of a rank's calls are in one order, those of its several threads too,
/// which must be the same on every rank. Dropping the last group's communicator waits for what was
/// issued.
///
/// # Errors
///
/// [`CommError::System`] where the system gives no thread.
pub fn overlapped(
    comm: Box<dyn Communicator>,
    beside: Beside,
) -> Result<Box<dyn Communicator>, CommError> {
    Ok(Box::new(Overlapped { queue: Queue::start(Arc::from(comm), beside)? }))
}

/// What a communication thread is told of the thread that it runs beside. By default nothing
/// interrupts that, and memory is the host's.
#[derive(Clone)]
pub struct Beside {
    /// Asked about ten times a second on a thread that waits for a handle: whether the rank is to
    /// give up, as after Ctrl-C.
    pub interrupted: fn() -> bool,
    /// What the others are told of an operation that unwound, as with a panic.
    pub why: fn(&(dyn Any + Send)) -> String,
    /// How work is ordered that a device does later.
    pub streams: Option<Arc<dyn Streams>>,
}

impl Default for Beside {
    fn default() -> Self {
        Self { interrupted: || false, why: of_panic, streams: None }
    }
}

impl fmt::Debug for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Beside")
    }
}

/// What computes while collectives run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Computes {
    /// The processors of this machine, which so many ranks are on.
    Host {
        /// Ranks on this machine.
        ranks_here: WorldSize,
    },
    /// A device of each rank's own.
    Device,
}

/// Where collectives run: as `asked`, or else beside what computes if the host has something free
/// for them. It does where a device computes, and where this process may use more processors than
/// there are ranks on its machine.
pub fn overlap(asked: Option<Overlap>, computes: Computes) -> Overlap {
    let has_spare = |ranks_here: WorldSize| {
        available_parallelism().is_ok_and(|processors| processors.get() > ranks_here.get())
    };
    asked.unwrap_or_else(|| match computes {
        Computes::Device => Overlap::On,
        Computes::Host { ranks_here } => has_spare(ranks_here).into(),
    })
}

/// What a panic said.
fn of_panic(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<&str>().copied();
    let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a panic on its communication thread: {}", said.unwrap_or("without words"))
}

struct Overlapped {
    queue: Queue,
}

impl Overlapped {
    fn inner(&self) -> &dyn Communicator {
        self.queue.inner()
    }
}

impl Communicator for Overlapped {
    fn rank(&self) -> Rank {
        self.inner().rank()
    }

    fn world_size(&self) -> WorldSize {
        self.inner().world_size()
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.inner().alloc(bytes)
    }

    fn alloc_scratch(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.inner().alloc_scratch(bytes)
    }

    fn alloc_replica(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.queue.issue(move |comm| comm.alloc_replica(bytes)).wait()
    }

    fn shares_replicas(&self) -> bool {
        self.inner().shares_replicas()
    }

    fn scratch(&self) -> Bytes {
        self.inner().scratch()
    }

    fn reduce_scatter(&self, op: ReduceScatter) -> Result<Handle<ReduceScatter>, CommError> {
        check_reduce_scatter(&op, self.world_size())?;
        Ok(self.queue.issue(move |comm| comm.reduce_scatter(op)?.wait()))
    }

    fn all_gather(&self, full: Buffer) -> Result<Handle<Buffer>, CommError> {
        check_shards("all-gather", full.numel(), self.world_size())?;
        Ok(self.queue.issue(move |comm| comm.all_gather(full)?.wait()))
    }

    fn all_gather_into(
        &self,
        shard: Buffer,
        full: Buffer,
    ) -> Result<Handle<(Buffer, Buffer)>, CommError> {
        check_gather_into(&shard, &full, self.world_size())?;
        Ok(self.queue.issue(move |comm| comm.all_gather_into(shard, full)?.wait()))
    }

    fn all_gather_many(
        &self,
        shards: Vec<OwnShard>,
        full: Buffer,
    ) -> Result<Handle<(Vec<OwnShard>, Buffer)>, CommError> {
        check_gather_many(&shards, &full)?;
        Ok(self.queue.issue(move |comm| comm.all_gather_many(shards, full)?.wait()))
    }

    fn peer_views(&self, shards: Vec<OwnShard>, dtype: DType) -> Result<PeerViews, CommError> {
        self.queue.issue(move |comm| comm.peer_views(shards, dtype)).wait()
    }

    fn end_peer_views(&self, views: PeerViews) -> Result<Vec<OwnShard>, CommError> {
        self.queue.issue(move |comm| comm.end_peer_views(views)).wait()
    }

    fn all_reduce(&self, buffer: Buffer) -> Result<Handle<Buffer>, CommError> {
        check_shards("reduce-scatter", buffer.numel(), self.world_size())?;
        Ok(self.queue.issue(move |comm| comm.all_reduce(buffer)?.wait()))
    }

    fn broadcast(&self, buffer: Buffer, root: Rank) -> Result<Handle<Buffer>, CommError> {
        check_root(root, self.world_size())?;
        Ok(self.queue.issue(move |comm| comm.broadcast(buffer, root)?.wait()))
    }

    fn exchange(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let (label, bytes) = (label.to_owned(), bytes.to_vec());
        self.queue.issue(move |comm| comm.exchange(&label, &bytes)).wait()
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.queue.issue(|comm| comm.barrier()).wait()
    }

    fn split(&self, group: &ProcessGroup) -> Result<Box<dyn Communicator>, CommError> {
        let group = group.clone();
        let split = self.queue.issue(move |comm| comm.split(&group)).wait()?;
        Ok(Box::new(Self { queue: self.queue.of_group(Arc::from(split)) }))
    }

    fn abort(&self, why: &str) {
        self.inner().abort(why);
    }

    fn traffic(&self) -> Traffic {
        // What was issued counts, and is counted where it runs.
        let counted = self.queue.issue(|comm| Ok(comm.traffic())).wait();
        counted.unwrap_or_else(|_| self.inner().traffic())
    }

    fn allocated(&self) -> Allocated {
        self.inner().allocated()
    }

    fn queue(&self) -> Option<&Queue> {
        Some(&self.queue)
    }
}
