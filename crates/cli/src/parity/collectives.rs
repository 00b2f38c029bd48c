//! A communicator with a fault, around one that works.

use std::sync::{Mutex, PoisonError};

use oxizero_comm::{
    Allocated, CommError, Communicator, Handle, OwnShard, ReduceScatter, ReduceTarget, Traffic,
};
use oxizero_core::{Bytes, DType, ProcessGroup, Rank, WorldSize};
use oxizero_device::kernels::{self, Combine};
use oxizero_device::{Buffer, Region, ViewMut};

/// What a communicator does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CommFault {
    /// As [`PoisonedMemory`](Self::PoisonedMemory), and where a shard of a sum ends in padding,
    /// that is read as its first element.
    ReadPadding,
    /// Ranks get the next one's shard of a sum.
    SwappedShards,
    /// The last rank contributes zeros.
    LostContribution,
    /// What is added to an earlier sum is lost: the boundary's micro-batch, in windows of two.
    LostMicroBatch,
    /// Sums are rounded to bf16.
    NarrowSum,
    /// The same contributions, added in another order.
    OtherOrder,
    /// Shards of sums are shifted by one element.
    OffByOne,
    /// Fresh memory is full of what is not a number. No fault: no padding may be read.
    PoisonedMemory,
    /// The last rank keeps what it had, whatever is broadcast.
    IgnoredBroadcast,
    /// Gathers exchange the shards of the first two ranks.
    SwappedGather,
    /// Rank 0 does not get the others' shards of what is gathered in place.
    StaleGather,
    /// The last rank's word on which parameters it used is lost.
    LostUse,
    /// All parameters count as used.
    InventedUse,
    /// The last rank's part of the norm is lost.
    LostNorm,
    /// The parts of the norm are those of the step before.
    StaleNorm,
    /// Sums over some of the ranks count as much more as there are more ranks: those of experts are
    /// divided by the micro-batches of their own group.
    OwnCount,
    /// As `SwappedGather`, in gathers of gradients between some of the ranks.
    SwappedParts,
}

/// A communicator with a fault.
pub(super) struct FaultyComm {
    inner: Box<dyn Communicator>,
    fault: CommFault,
    /// Ranks of the world, of which these may be some.
    world: usize,
    /// What the ranks reported last.
    reported: Mutex<Option<Vec<Vec<u8>>>>,
}

/// The last byte of what a rank says of its window. Before it are so many bytes of numbers, and a
/// bit for each used parameter.
const WINDOW: u8 = 1;
const WINDOW_LEN: usize = 48;
/// The last byte of what a rank reports before a step, of which the first are its part of the norm.
const REPORT: u8 = 3;
const NORM_LEN: usize = 8;

impl FaultyComm {
    pub(super) fn new(inner: Box<dyn Communicator>, fault: CommFault) -> Self {
        let world = inner.world_size().get();
        Self { inner, fault, world, reported: Mutex::new(None) }
    }

    fn is_of_some(&self) -> bool {
        self.world_size().get() < self.world
    }

    fn is_last(&self) -> bool {
        self.rank().0 + 1 == self.world_size().get()
    }

    /// What this rank contributes.
    fn spoil_partial(&self, op: &mut ReduceScatter) -> Result<(), CommError> {
        let ranks = self.world_size().get();
        match self.fault {
            CommFault::SwappedShards => {
                let bytes = op.partial.view_mut().bytes_mut();
                bytes.rotate_left(bytes.len() / ranks);
            }
            CommFault::LostContribution if self.is_last() => {
                op.partial.view_mut().bytes_mut().fill(0);
            }
            CommFault::LostMicroBatch => {
                if matches!(op.target, ReduceTarget::Shard(_, Combine::Add)) {
                    op.partial.view_mut().bytes_mut().fill(0);
                }
            }
            CommFault::OtherOrder => {
                let told = self.inner.exchange("a fault", op.partial.view().bytes())?;
                let next = &told[(self.rank().0 + 1) % ranks];
                op.partial.view_mut().bytes_mut().copy_from_slice(next);
            }
            _ => {}
        }
        Ok(())
    }

    /// The shard of the sum that this rank gets.
    fn spoil_sum(&self, op: &mut ReduceScatter) {
        let mut sum = self.sum_mut(op);
        match self.fault {
            CommFault::NarrowSum => {
                let mut narrow = Buffer::heap(sum.as_view().numel(), DType::Bf16);
                kernels::cast(sum.as_view(), narrow.view_mut());
                kernels::cast(narrow.view(), sum);
            }
            CommFault::OffByOne => {
                let element = sum.as_view().dtype().size();
                let bytes = sum.reborrow().bytes_mut();
                if !bytes.is_empty() {
                    bytes.rotate_left(element);
                }
            }
            CommFault::ReadPadding => {
                let element = sum.as_view().dtype().size();
                let bytes = sum.bytes_mut();
                if bytes.ends_with(&[u8::MAX; 2]) {
                    bytes.copy_within(bytes.len() - element.., 0);
                }
            }
            CommFault::OwnCount if self.is_of_some() => {
                let counts = (self.world / self.world_size().get()) as f32;
                kernels::divide(sum, 1.0 / counts);
            }
            _ => {}
        }
    }

    fn sum_mut<'a>(&self, op: &'a mut ReduceScatter) -> ViewMut<'a> {
        let numel = op.partial.numel().0 / self.world_size().get();
        let own = self.rank().0 * numel..(self.rank().0 + 1) * numel;
        match &mut op.target {
            ReduceTarget::InPlace => op.partial.range_mut(own),
            ReduceTarget::Shard(shard, _) => shard.view_mut(),
            ReduceTarget::ShardOf(full) => full.range_mut(own),
        }
    }

    fn spoil_gathered(&self, full: &mut Buffer, before: &[u8]) {
        let ranks = self.world_size().get();
        let bytes = full.view_mut().bytes_mut();
        match self.fault {
            CommFault::SwappedGather if ranks > 1 => {
                let shard = bytes.len() / ranks;
                let (first, rest) = bytes.split_at_mut(shard);
                first.swap_with_slice(&mut rest[..shard]);
            }
            CommFault::StaleGather if self.rank() == Rank(0) => bytes.copy_from_slice(before),
            _ => {}
        }
    }

    /// Exchanges what the first two ranks gave, place after place, where all ranks gave as much.
    fn spoil_gathered_many(&self, lens: &[usize], full: &mut Buffer) {
        let (ranks, element) = (self.world_size().get(), full.dtype().size());
        let exchanges = match self.fault {
            CommFault::SwappedGather => !self.is_of_some(),
            CommFault::SwappedParts => self.is_of_some(),
            _ => false,
        };
        let equal = lens.iter().sum::<usize>() * ranks == full.numel().0;
        let mut bytes = full.view_mut().bytes_mut();
        for len in lens.iter().filter(|_| exchanges && equal && ranks > 1) {
            let (place, rest) = bytes.split_at_mut(len * ranks * element);
            let (first, others) = place.split_at_mut(len * element);
            first.swap_with_slice(&mut others[..len * element]);
            bytes = rest;
        }
    }

    fn spoil_told(&self, told: &mut [Vec<u8>]) {
        let last = told.len() - 1;
        let Some((message, said)) = told[last].split_last_mut() else { return };
        match (self.fault, *message) {
            (CommFault::LostUse, WINDOW) => said[WINDOW_LEN..].fill(0),
            (CommFault::InventedUse, WINDOW) => said[WINDOW_LEN..].fill(u8::MAX),
            (CommFault::LostNorm, REPORT) => said[..NORM_LEN].fill(0),
            (CommFault::StaleNorm, REPORT) => {
                let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
                let earlier = reported.replace(told.to_vec());
                for (new, earlier) in told.iter_mut().zip(earlier.iter().flatten()) {
                    new[..NORM_LEN].copy_from_slice(&earlier[..NORM_LEN]);
                }
            }
            _ => {}
        }
    }
}

impl Communicator for FaultyComm {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> WorldSize {
        self.inner.world_size()
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, CommError> {
        let mut region = self.inner.alloc(bytes)?;
        if matches!(self.fault, CommFault::PoisonedMemory | CommFault::ReadPadding) {
            region.bytes_mut().fill(u8::MAX);
        }
        Ok(region)
    }

    fn alloc_replica(&self, bytes: Bytes) -> Result<Region, CommError> {
        self.inner.alloc_replica(bytes)
    }

    fn shares_replicas(&self) -> bool {
        self.inner.shares_replicas()
    }

    fn scratch(&self) -> Bytes {
        self.inner.scratch()
    }

    fn reduce_scatter(&self, mut op: ReduceScatter) -> Result<Handle<ReduceScatter>, CommError> {
        self.spoil_partial(&mut op)?;
        let mut summed = self.inner.reduce_scatter(op)?.wait()?;
        self.spoil_sum(&mut summed);
        Ok(Handle::done(Ok(summed)))
    }

    fn all_gather(&self, full: Buffer) -> Result<Handle<Buffer>, CommError> {
        let before = full.view().bytes().to_vec();
        let mut full = self.inner.all_gather(full)?.wait()?;
        self.spoil_gathered(&mut full, &before);
        Ok(Handle::done(Ok(full)))
    }

    fn all_gather_into(
        &self,
        shard: Buffer,
        full: Buffer,
    ) -> Result<Handle<(Buffer, Buffer)>, CommError> {
        let before = full.view().bytes().to_vec();
        let (shard, mut full) = self.inner.all_gather_into(shard, full)?.wait()?;
        self.spoil_gathered(&mut full, &before);
        Ok(Handle::done(Ok((shard, full))))
    }

    fn all_gather_many(
        &self,
        shards: Vec<OwnShard>,
        full: Buffer,
    ) -> Result<Handle<(Vec<OwnShard>, Buffer)>, CommError> {
        let lens: Vec<_> = shards.iter().map(|shard| shard.own.len()).collect();
        let (shards, mut full) = self.inner.all_gather_many(shards, full)?.wait()?;
        self.spoil_gathered_many(&lens, &mut full);
        Ok(Handle::done(Ok((shards, full))))
    }

    fn broadcast(&self, buffer: Buffer, root: Rank) -> Result<Handle<Buffer>, CommError> {
        let before = buffer.view().bytes().to_vec();
        let mut buffer = self.inner.broadcast(buffer, root)?.wait()?;
        if self.fault == CommFault::IgnoredBroadcast && self.is_last() {
            buffer.view_mut().bytes_mut().copy_from_slice(&before);
        }
        Ok(Handle::done(Ok(buffer)))
    }

    fn exchange(&self, label: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut told = self.inner.exchange(label, bytes)?;
        self.spoil_told(&mut told);
        Ok(told)
    }

    fn barrier(&self) -> Result<(), CommError> {
        self.inner.barrier()
    }

    fn split(&self, group: &ProcessGroup) -> Result<Box<dyn Communicator>, CommError> {
        let inner = self.inner.split(group)?;
        let (fault, world) = (self.fault, self.world);
        Ok(Box::new(Self { inner, fault, world, reported: Mutex::new(None) }))
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn allocated(&self) -> Allocated {
        self.inner.allocated()
    }
}
