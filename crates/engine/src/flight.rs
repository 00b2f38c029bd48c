//! What is on its way beside the caller's work, and the backward pass that it is on its way in.

use oxizero_comm::CommError;
use oxizero_core::{BucketId, Overlap, Placement};

use crate::bucket::Bucket;
use crate::observer::{Observation, Span};
use crate::window::MicroBatch;
use crate::{Engine, EngineError};

/// What has begun and not ended.
#[derive(Debug, Default)]
pub(crate) struct UnderWay {
    /// The bucket whose reduction was started last, and not waited for.
    reduction: Option<BucketId>,
    /// A backward pass, as far as an observer was told.
    pass: bool,
}

impl Engine {
    /// Starts a bucket's reduction, beside what the caller does next where operations run on a
    /// thread of their own. There is at most one in flight: each holds a bucket of memory.
    pub(crate) fn reduce(
        &mut self,
        id: BucketId,
        to: (Placement, usize),
    ) -> Result<(), EngineError> {
        self.land()?;
        let seen = self.groups.observed().of(Span::Reduce(id));
        self.on_bucket(id, |bucket, comm| bucket.reduce(to, comm, seen))?;
        self.under_way.reduction = Some(id);
        match self.groups.overlap() {
            Overlap::On => Ok(()),
            Overlap::Off => self.land(),
        }
    }

    /// Waits for the reduction in flight, if there is one.
    pub(crate) fn land(&mut self) -> Result<(), EngineError> {
        self.under_way.reduction.take().map_or(Ok(()), |id| self.wait_for(id, Bucket::land))
    }

    /// Waits for all model weights that are on their way.
    pub(crate) fn settle(&mut self) -> Result<(), EngineError> {
        let buckets = self.buckets.iter().enumerate();
        let under_way = buckets.filter(|(_, bucket)| bucket.is_under_way());
        let ids: Vec<_> = under_way.map(|(index, _)| BucketId(index)).collect();
        ids.into_iter().try_for_each(|id| self.wait_for(id, Bucket::settle))
    }

    /// Waits for what is done to a bucket.
    pub(crate) fn wait_for<T>(
        &mut self,
        id: BucketId,
        wait: impl FnOnce(&mut Bucket) -> Result<T, CommError>,
    ) -> Result<T, EngineError> {
        let seen = match self.groups.overlap() {
            Overlap::On => self.groups.observed().of(Span::Wait(id)),
            Overlap::Off => Observation::default(),
        };
        self.on_bucket(id, |bucket, _| seen.during(|| wait(bucket)))
    }

    /// Something of a backward pass happens.
    pub(crate) fn begin_pass(&mut self) {
        self.window.micro_batch = MicroBatch::Open;
        if !std::mem::replace(&mut self.under_way.pass, true) {
            self.groups.observed().begin(Span::BackwardPass);
        }
    }

    pub(crate) fn end_pass(&mut self) {
        if std::mem::take(&mut self.under_way.pass) {
            self.groups.observed().end(Span::BackwardPass);
        }
    }
}
