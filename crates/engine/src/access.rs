//! Whole gradients and weights, read between steps.

use std::ops::Range;

use oxizero_core::{Layout, Numel, ParamId, Placement};
use oxizero_device::{Buffer, View, kernels};

use crate::bucket::Bucket;
use crate::gradient::alloc;
use crate::window::{MicroBatch, WindowState};
use crate::{Engine, EngineError};

impl Engine {
    /// The whole gradient of a parameter, between the window's last
    /// [`backward_end`](Engine::backward_end) and its step; a collective call.
    ///
    /// It is summed over ranks and micro-batches, divided and unscaled, in the accumulation dtype,
    /// before clipping. A parameter that no rank used has zeros; `None` for a frozen one. After
    /// this, the window takes no more gradients.
    pub fn full_grad(&mut self, param: ParamId) -> Result<Option<Buffer>, EngineError> {
        let (index, count) = (param.0, self.specs.len());
        let state = self.params.get(index);
        let state = state.ok_or(EngineError::Unknown { what: "parameter", index, count })?;
        let (bucket, slot) = (state.bucket, state.slot);
        self.check_ready()?;
        self.reduce_window()?;
        let WindowState::Reduced(reduced) = &self.window.state else {
            unreachable!("reduce_window() leaves a reduced window")
        };
        let divisor = reduced.divisor();
        let bucket = &self.buckets[bucket.0];
        if bucket.grad_dtype().is_none() {
            return Ok(None);
        }
        let mut grad = match self.options.stage.optim() {
            Placement::Sharded => self.gather_slot(bucket, slot, Bucket::grad)?,
            _ => copy(bucket, slot, Bucket::grad),
        };
        kernels::divide(grad.view_mut(), divisor);
        Ok(Some(grad))
    }

    /// The whole f32 master weights of a parameter; a collective call, outside of its unit's
    /// forward and backward. `None` for a frozen one.
    pub fn full_param(&mut self, param: ParamId) -> Result<Option<Buffer>, EngineError> {
        let (index, count) = (param.0, self.specs.len());
        let state = self.params.get(index);
        let state = state.ok_or(EngineError::Unknown { what: "parameter", index, count })?;
        let (id, slot) = (state.bucket, state.slot);
        self.buckets[id.0].gathered()?; // a shard that is being gathered comes back
        let bucket = &self.buckets[id.0];
        if !bucket.spec().trainable {
            return Ok(None);
        }
        Ok(Some(match self.options.stage.optim() {
            Placement::Sharded => self.gather_slot(bucket, slot, Bucket::master)?,
            _ => copy(bucket, slot, Bucket::master),
        }))
    }

    fn backward_ended(&self) -> bool {
        self.window.micro_batch == MicroBatch::BackwardEnded
    }

    fn check_ready(&self) -> Result<(), EngineError> {
        let of = self.options.accumulation;
        match self.window.state {
            WindowState::Reduced(_) => Ok(()),
            WindowState::Empty => Err(EngineError::NotReady),
            WindowState::Consumed => Err(EngineError::Consumed),
            WindowState::Accumulating(n) if n + 1 >= of && self.backward_ended() => Ok(()),
            WindowState::Accumulating(0) if !self.backward_ended() => Err(EngineError::NotReady),
            WindowState::Accumulating(n) => {
                Err(EngineError::MidWindow { n: n + usize::from(self.backward_ended()), of })
            }
        }
    }

    /// Gathers the pieces of one parameter, each rank's padded to the longest.
    fn gather_slot(
        &self,
        bucket: &Bucket,
        slot: usize,
        elements: Elements,
    ) -> Result<Buffer, EngineError> {
        let layout = &bucket.spec().layout;
        let pieces = pieces(layout, slot);
        let mine = elements(bucket, pieces[self.comm.rank().0].clone()).expect(TRAINED);
        let dtype = mine.dtype();
        let longest = pieces.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
        let world_size = self.comm.world_size().get();
        let mut all = alloc(&*self.comm, Numel(longest * world_size), dtype)?;
        let rank = self.comm.rank().0;
        let start = rank * longest;
        kernels::cast(mine, all.range_mut(start..start + pieces[rank].len()));
        let all = self.comm.all_gather(all)?.wait()?;
        let mut whole = Buffer::heap(Numel(layout.slot(slot).len()), dtype);
        let mut end = 0;
        for (rank, piece) in pieces.iter().enumerate() {
            let (start, from) = (end, rank * longest);
            end += piece.len();
            kernels::cast(all.range(from..from + piece.len()), whole.range_mut(start..end));
        }
        Ok(whole)
    }
}

/// By rank: the elements of the bucket that belong to the parameter and to the rank; maybe none.
fn pieces(layout: &Layout, slot: usize) -> Vec<Range<usize>> {
    let slot = layout.slot(slot);
    let overlap = |rank| {
        let shard = layout.shard(rank);
        let (start, end) = (slot.start.max(shard.start), slot.end.min(shard.end));
        if start < end { start..end } else { shard.start..shard.start }
    };
    layout.world_size().ranks().map(overlap).collect()
}

fn copy(bucket: &Bucket, slot: usize, elements: Elements) -> Buffer {
    let elements = elements(bucket, bucket.spec().layout.slot(slot)).expect(TRAINED);
    let mut copy = Buffer::heap(elements.numel(), elements.dtype());
    kernels::cast(elements, copy.view_mut());
    copy
}

/// What is read of a bucket: elements of a range that this rank owns.
type Elements = for<'a> fn(&'a Bucket, Range<usize>) -> Option<View<'a>>;

const TRAINED: &str = "the parameter is trained, and its unit not in forward or backward";
