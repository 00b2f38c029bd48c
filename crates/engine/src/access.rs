//! Whole gradients, between the window's last backward and its step: read, edited, measured.
//!
//! The first call takes the window's gradients to the optimizer's placement; after it the window
//! takes no more gradients. They are divided where they lie, but not in accumulators narrower than
//! f32, which would round the quotient: there what is read is divided as it is copied, and only an
//! edit divides in place. So the step after a read gives the same bits as if nobody had looked.
//! Every rank makes the same calls in the same order.

use std::ops::Range;

use oxizero_core::{DType, Numel, ParamId, Placement};
use oxizero_device::{Buffer, View, ViewMut, kernels};

use crate::bucket::{Bucket, Field, overlap};
use crate::model_grads::ModelGrads;
use crate::window::{MicroBatch, WindowState};
use crate::{Engine, EngineError, GradNorms};

/// The part of a parameter that this rank's optimizer updates.
#[derive(Clone, Debug)]
pub struct Local<'a> {
    /// Which of the parameter's elements; empty where the rank owns none.
    pub elements: Range<usize>,
    /// Their values.
    pub values: View<'a>,
}

impl Engine {
    /// The whole gradient of a parameter; a collective call.
    ///
    /// It is summed over ranks and micro-batches, divided and unscaled, in the accumulation dtype,
    /// before clipping. A parameter that no rank used has zeros; `None` for a frozen one.
    pub fn full_grad(&mut self, param: ParamId) -> Result<Option<Buffer>, EngineError> {
        let divisor = self.begin_read("full_grad", Some(param))?;
        let mut grad = self.full_field(param, Field::Grad)?;
        grad.iter_mut().for_each(|grad| divide(grad.view_mut(), divisor));
        Ok(grad)
    }

    /// The whole gradients of all parameters; a collective call, of one collective for each dtype
    /// of accumulators.
    pub fn full_grads(&mut self) -> Result<ModelGrads, EngineError> {
        let mut grads = ModelGrads::default();
        self.full_grads_into(&mut grads)?;
        Ok(grads)
    }

    /// The same, in the memory of `grads` where it fits, such as that of an earlier window: page
    /// faults of fresh memory take longer than the copy. After an error `grads` may be empty.
    pub fn full_grads_into(&mut self, grads: &mut ModelGrads) -> Result<(), EngineError> {
        let divisor = self.begin_read("full_grads", None)?;
        let mut dtypes: Vec<_> = self.buckets.iter().filter_map(Bucket::grad_dtype).collect();
        dtypes.sort_unstable();
        dtypes.dedup();
        let mut old = std::mem::replace(grads, ModelGrads::new(&self.specs)).into_flats();
        for dtype in dtypes {
            let of_dtype = |bucket: &Bucket| bucket.grad_dtype() == Some(dtype);
            let members: Vec<usize> =
                (0..self.buckets.len()).filter(|index| of_dtype(&self.buckets[*index])).collect();
            let numel = members.iter().map(|index| self.numel(*index)).sum();
            let fits = |flat: &Buffer| flat.dtype() == dtype && flat.numel() == numel;
            let flat = match old.iter().position(fits) {
                Some(index) => old.swap_remove(index),
                None => Buffer::heap(numel, dtype),
            };
            let mut flat = self.gather_grads(&members, flat)?;
            divide(flat.view_mut(), divisor);
            let flat = grads.add(flat);
            let mut start = 0;
            for index in members {
                let spec = self.buckets[index].spec();
                for (slot, param) in spec.params.iter().enumerate() {
                    let at = spec.layout.slot(slot);
                    grads.place(*param, flat, start + at.start..start + at.end);
                }
                start += self.numel(index).0;
            }
        }
        Ok(())
    }

    /// Replaces the whole gradient of a parameter, before clipping; a collective call in which each
    /// rank takes its part of the values that it was given. A parameter that nobody used is then
    /// updated too.
    pub fn set_full_grad(&mut self, param: ParamId, values: View<'_>) -> Result<(), EngineError> {
        let given = self.check_values(param, values);
        self.begin_edit("set_full_grad", Some(param), given)?;
        self.write_grad(param, values);
        Ok(())
    }

    /// Replaces the gradients of all parameters that `grads` has; a collective call.
    pub fn set_full_grads(&mut self, grads: &ModelGrads) -> Result<(), EngineError> {
        let given: Vec<_> = grads.iter().collect();
        let fine = given.iter().try_for_each(|(param, values)| self.check_values(*param, *values));
        self.begin_edit("set_full_grads", None, fine)?;
        for (param, values) in given {
            self.write_grad(param, values);
        }
        Ok(())
    }

    /// Edits the gradients that this rank's optimizer reads, element by element: `edit` is given
    /// the parameter, which of its elements they are, and their values. A collective call, but no
    /// gradient travels. Where every rank updates every element, all must edit alike.
    pub fn map_grads(
        &mut self,
        mut edit: impl FnMut(ParamId, Range<usize>, ViewMut<'_>),
    ) -> Result<(), EngineError> {
        self.begin_edit("map_grads", None, Ok(()))?;
        for bucket in &mut self.buckets {
            let Some(owned) = bucket.owned() else { continue };
            let pieces: Vec<_> = bucket.spec().layout.pieces(owned).collect();
            for piece in pieces {
                let param = bucket.spec().params[piece.slot];
                if let Some(values) = bucket.grad_mut(piece.in_bucket) {
                    edit(param, piece.in_param, values);
                }
            }
        }
        Ok(())
    }

    /// The part of a gradient that this rank's optimizer reads; a collective call. `None` for a
    /// frozen parameter. Counts as an edit, for it shows the gradient where it lies.
    pub fn local_grad(&mut self, param: ParamId) -> Result<Option<Local<'_>>, EngineError> {
        let given = self.check_param(param);
        self.begin_edit("local_grad", Some(param), given)?;
        self.local_field(param, Field::Grad)
    }

    /// Replaces the part of a gradient that this rank's optimizer reads; a collective call, for
    /// which each rank hands in as many elements as [`local_grad`](Self::local_grad) gave it.
    pub fn set_local_grad(&mut self, param: ParamId, values: View<'_>) -> Result<(), EngineError> {
        let range = self.check_local_values(param, values);
        let range = self.begin_edit("set_local_grad", Some(param), range)?;
        if !range.is_empty() {
            let id = self.params[param.0].bucket;
            if let Some(target) = self.buckets[id.0].grad_mut(range) {
                kernels::cast(values, target);
            }
        }
        self.mark_set(param);
        Ok(())
    }

    /// The norm of each parameter's gradient, before clipping; a collective call of one small
    /// exchange.
    pub fn grad_norms(&mut self) -> Result<GradNorms, EngineError> {
        let divisor = self.begin_read("grad_norms", None)?;
        let norm = self.options.norm;
        let mut parts = vec![0.0; self.specs.len()];
        for bucket in &self.buckets {
            bucket.measure_each(norm, divisor, &mut parts);
        }
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_le_bytes()).collect();
        let told = self.comm.exchange(&bytes).map_err(|error| self.fail(error))?;
        let part = |rank: &Vec<u8>, param: usize| {
            let bytes = &rank[8 * param..8 * (param + 1)];
            f64::from_le_bytes(bytes.try_into().expect("a slice of eight bytes"))
        };
        let of = |(index, spec): (usize, &oxizero_core::ParamSpec)| {
            spec.trainable.then(|| norm.of_parts(told.iter().map(|rank| part(rank, index))))
        };
        Ok(self.specs.iter().enumerate().map(of).collect())
    }

    /// Begins a call that only looks. Returns what gradients are still to be divided by.
    fn begin_read(&mut self, call: &str, param: Option<ParamId>) -> Result<f32, EngineError> {
        let given = param.map_or(Ok(()), |param| self.check_param(param));
        self.begin_access(call, param, given)?;
        let mut dtypes = self.buckets.iter().filter_map(Bucket::grad_dtype);
        if dtypes.all(|dtype| dtype == DType::F32) {
            self.divide_window();
        }
        match &self.window.state {
            WindowState::Reduced(reduced) => Ok(reduced.divisor()),
            _ => unreachable!("begin_access() leaves a reduced window"),
        }
    }

    /// Begins a call that gives gradients other values.
    fn begin_edit<T>(
        &mut self,
        call: &str,
        param: Option<ParamId>,
        given: Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let given = self.begin_access(call, param, given)?;
        self.divide_window();
        Ok(given)
    }

    /// Refuses the call at the wrong time, if a rank refuses what it was `given`, or if the ranks
    /// call different things; then reduces the window's gradients.
    fn begin_access<T>(
        &mut self,
        call: &str,
        param: Option<ParamId>,
        given: Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.check_alive()?;
        let given = given.and_then(|given| self.check_ready().map(|()| given));
        let given = self.agree_call(call, param, given)?;
        self.reduce_window()?;
        Ok(given)
    }

    /// The elements that this rank's optimizer updates, if these are values of as many.
    fn check_local_values(
        &self,
        param: ParamId,
        values: View<'_>,
    ) -> Result<Range<usize>, EngineError> {
        let (at, owned) = self.owned_of(param)?;
        let range = overlap(&at, &owned).unwrap_or(at.start..at.start);
        if values.numel().0 != range.len() {
            return Err(self.wrong_numel(param, Numel(range.len()), values.numel()));
        }
        Ok(range)
    }

    fn check_ready(&self) -> Result<(), EngineError> {
        let of = self.options.accumulation;
        let ended = self.window.micro_batch == MicroBatch::BackwardEnded;
        match self.window.state {
            WindowState::Reduced(_) => Ok(()),
            WindowState::Empty => Err(EngineError::NotReady),
            WindowState::Consumed => Err(EngineError::Consumed),
            WindowState::Accumulating(n) if self.ends(n + 1) && ended => Ok(()),
            WindowState::Accumulating(0) if !ended => Err(EngineError::NotReady),
            WindowState::Accumulating(n) => {
                Err(EngineError::MidWindow { n: n + usize::from(ended), of })
            }
        }
    }

    /// Divides the gradients that this rank's optimizer reads, where they lie.
    fn divide_window(&mut self) {
        let WindowState::Reduced(reduced) = &mut self.window.state else { return };
        let divisor = reduced.divisor();
        reduced.divided();
        for bucket in &mut self.buckets {
            let Some(owned) = bucket.owned() else { continue };
            let pieces: Vec<_> = bucket.spec().layout.pieces(owned).collect();
            for piece in pieces {
                if let Some(values) = bucket.grad_mut(piece.in_bucket) {
                    divide(values, divisor);
                }
            }
        }
    }

    /// Fills `flat` with the whole gradients of these buckets, one after the other.
    fn gather_grads(&mut self, members: &[usize], mut flat: Buffer) -> Result<Buffer, EngineError> {
        if self.options.stage.optim() == Placement::Replicated {
            let mut start = 0;
            for index in members {
                let bucket = &self.buckets[*index];
                let all = bucket.spec().layout.all();
                let end = start + all.len();
                if let Some(values) = bucket.field(Field::Grad, all) {
                    kernels::cast(values, flat.range_mut(start..end));
                }
                start = end;
            }
            return Ok(flat);
        }
        let take = |index: &usize| self.buckets[*index].take_grad();
        let shards = members.iter().filter_map(take).collect();
        let gathered = self.comm.all_gather_many(shards, flat).and_then(|handle| handle.wait());
        let (shards, flat) = gathered.map_err(|error| self.fail(error))?;
        for (index, shard) in members.iter().zip(shards) {
            self.buckets[*index].give_grad(shard);
        }
        Ok(flat)
    }

    fn numel(&self, bucket: usize) -> Numel {
        self.buckets[bucket].spec().layout.padded_numel()
    }

    fn write_grad(&mut self, param: ParamId, values: View<'_>) {
        let Ok((at, owned)) = self.owned_of(param) else { return };
        if let Some(range) = overlap(&at, &owned) {
            let id = self.params[param.0].bucket;
            let in_param = range.start - at.start..range.end - at.start;
            if let Some(target) = self.buckets[id.0].grad_mut(range) {
                kernels::cast(values.range(in_param), target);
            }
        }
        self.mark_set(param);
    }

    fn mark_set(&mut self, param: ParamId) {
        if let WindowState::Reduced(reduced) = &mut self.window.state {
            reduced.set(param);
        }
    }
}

fn divide(values: ViewMut<'_>, divisor: f32) {
    if divisor != 1.0 {
        kernels::divide(values, divisor);
    }
}
