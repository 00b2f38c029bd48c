//! Full model weights in memory of the front-end's own, which it frees between uses.
//!
//! Where weights rest sharded, a front-end that owns its tensors' memory has them gathered into it
//! ([`Engine::gather_into`]), and says when that memory is gone ([`Engine::let_go`]). It orders
//! gathers itself: all ranks gather the same buckets at the same times, which is checked.

use oxizero_core::{BucketId, BucketSpec, Event, Overlap};
use oxizero_device::{Buffer, View};

use crate::bucket::Bucket;
use crate::observer::Span;
use crate::{Engine, EngineError};

impl Engine {
    /// The buckets: which parameters are gathered and reduced together, and where each lies.
    pub fn buckets(&self) -> impl ExactSizeIterator<Item = &BucketSpec> {
        self.buckets.iter().map(Bucket::spec)
    }

    /// Where collectives run: whether gathers that are started go on beside what the caller does.
    pub fn overlap(&self) -> Overlap {
        self.groups.overlap()
    }

    /// Gathers the full model weights of a bucket into `full`, memory of the caller's own of the
    /// bucket's padded elements and dtype, which comes back when it is filled; a collective call.
    /// Until [`let_go`](Self::let_go) the weights count as held, and nobody writes them.
    pub fn gather_into(&mut self, id: BucketId, full: Buffer) -> Result<Buffer, EngineError> {
        self.start_gather(id, full)?;
        self.finish_gather(id)
    }

    /// Starts to gather them; a collective call. Until [`finish_gather`](Self::finish_gather) or
    /// [`let_go`](Self::let_go), which wait for it, other gathers may be started and finished, and
    /// gradients given.
    pub fn start_gather(&mut self, id: BucketId, full: Buffer) -> Result<(), EngineError> {
        self.check_alive()?;
        let given = self.check_full(id, full.view()).and_then(|()| {
            let first = "its weights are being gathered already; finish_gather() comes first";
            let is_first = !self.buckets[id.0].is_arriving();
            is_first.then_some(()).ok_or_else(|| self.not_so(id, first))
        });
        let first = self.buckets.get(id.0).map(|bucket| bucket.spec().params[0]);
        self.agree_call("the weights", first, given)?;
        let seen = self.groups.observed().of(Span::Gather(id));
        self.on_bucket(id, |bucket, comm| bucket.start_gather(full, comm, seen))
    }

    /// Waits for the gather of a bucket that was started, and gives its memory back.
    pub fn finish_gather(&mut self, id: BucketId) -> Result<Buffer, EngineError> {
        self.check_alive()?;
        self.check_bucket(id)?;
        let filled = self.wait_for(id, Bucket::finish_gather)?;
        filled.ok_or_else(|| self.not_so(id, "no gather of its weights was started"))
    }

    /// The memory that a bucket was gathered into holds its weights no longer.
    pub fn let_go(&mut self, id: BucketId) -> Result<(), EngineError> {
        self.check_bucket(id)?;
        self.on_bucket(id, |bucket, _| bucket.let_go())
    }

    /// Whether nobody has written to the gathered weights of a bucket, `full`, as far as this rank
    /// can tell from what rests on it: each element rests on one of the ranks.
    pub fn is_as_gathered(&self, id: BucketId, full: View<'_>) -> Result<bool, EngineError> {
        self.check_full(id, full)?;
        Ok(self.buckets[id.0].is_as_gathered(full))
    }

    /// The caller has written to the gathered weights of a bucket, `full`: the model weights and
    /// master weights that this rank owns follow, and masters keep their precision where nothing
    /// was written. No rank waits for another; all write alike, which the next step or save checks.
    pub fn take_over_gathered(&mut self, id: BucketId, full: View<'_>) -> Result<(), EngineError> {
        self.check_alive()?;
        self.check_full(id, full)?;
        self.run(Event::Edit)?;
        self.on_bucket(id, |bucket, _| {
            bucket.take_over_gathered(full);
            Ok(())
        })?;
        self.note_gathered(id, full);
        Ok(())
    }

    /// Says of a bucket that its gradients are complete only when
    /// [`grads_end`](Self::grads_end) says so, or at the end of the pass: for parameters of which
    /// each rank may use others.
    pub fn await_grads_end(&mut self, id: BucketId) -> Result<(), EngineError> {
        self.check_bucket(id)?;
        self.awaits_end[id.0] = true;
        Ok(())
    }

    /// No more gradients of the bucket come in this pass: parameters that gave none contribute
    /// zeros, and do not count as used. All ranks call it at the same place between gathers.
    pub fn grads_end(&mut self, id: BucketId) -> Result<(), EngineError> {
        self.check_alive()?;
        self.check_bucket(id)?;
        self.open_window()?;
        self.begin_pass();
        self.run(Event::GradsReady(id))
    }

    fn check_bucket(&self, id: BucketId) -> Result<(), EngineError> {
        let (index, count) = (id.0, self.buckets.len());
        let known = index < count;
        known.then_some(()).ok_or(EngineError::Unknown { what: "bucket", index, count })
    }

    fn check_full(&self, id: BucketId, full: View<'_>) -> Result<(), EngineError> {
        self.check_bucket(id)?;
        let spec = self.buckets[id.0].spec();
        let (what, param) = ("gathered weights", self.names_of(spec));
        let (expected, got) = (spec.layout.padded_numel(), full.numel());
        if expected != got {
            return Err(EngineError::WrongNumel { what, param, expected, got });
        }
        let (expected, got) = (spec.dtype, full.dtype());
        match expected == got {
            true => Ok(()),
            false => Err(EngineError::WrongDType { what, param, expected, got }),
        }
    }

    fn not_so(&self, id: BucketId, problem: &str) -> EngineError {
        let param = self.names_of(self.buckets[id.0].spec());
        EngineError::Param { param, problem: problem.into() }
    }

    /// The first parameter's name, which says enough in a message, and no two buckets share.
    fn names_of(&self, spec: &BucketSpec) -> String {
        spec.params.first().map(|param| self.specs[param.0].name.clone()).unwrap_or_default()
    }
}
