//! A parameter's gradient, between the window's last backward and its step: read, edited, measured.
//! `full_grads.rs` does so for the whole model.
//!
//! The first call takes the window's gradients to the optimizer's placement; after it the window
//! takes no more gradients. They are divided where they lie, but not in accumulators narrower than
//! f32, which would round the quotient: there what is read is divided as it is copied, and only an
//! edit divides in place. So the step after a read gives the same bits as if nobody had looked.
//! Every rank makes the same calls in the same order.

use std::ops::Range;

use oxizero_core::{DType, ParamId, ParamSpec};
use oxizero_device::{Buffer, View, ViewMut, kernels};

use crate::bucket::{Bucket, Field, overlap};
use crate::groups::Message;
use crate::params::Of;
use crate::window::{MicroBatch, WindowState};
use crate::{Engine, EngineError, GradNorms};

/// The part of a parameter that this rank's optimizer updates.
#[derive(Debug)]
pub struct Local<'a> {
    /// Which of the parameter's elements; empty where the rank owns none.
    pub elements: Range<usize>,
    values: Values<'a>,
}

#[derive(Debug)]
enum Values<'a> {
    Lent(View<'a>),
    /// What lies in the engine is still to be divided, and would lose precision.
    Divided(Buffer),
}

impl<'a> Local<'a> {
    pub(crate) fn new(elements: Range<usize>, values: View<'a>) -> Self {
        Self { elements, values: Values::Lent(values) }
    }

    /// The values of the elements.
    pub fn values(&self) -> View<'_> {
        match &self.values {
            Values::Lent(values) => *values,
            Values::Divided(values) => values.view(),
        }
    }

    fn divided(self, divisor: f32) -> Self {
        if divisor == 1.0 {
            return self;
        }
        let mut values = Buffer::copy_of(self.values());
        kernels::divide(values.view_mut(), divisor);
        Self { values: Values::Divided(values), ..self }
    }
}

impl Engine {
    /// The whole gradient of a parameter; a collective call.
    ///
    /// It is summed over ranks and micro-batches, divided and unscaled, in the accumulation dtype,
    /// before clipping, and has the shape of the parameter's [`ParamSpec`]: of a tensor that the
    /// mesh splits, this rank's part. A parameter that no rank used has zeros; `None` for a frozen
    /// one.
    pub fn full_grad(&mut self, param: ParamId) -> Result<Option<Buffer>, EngineError> {
        let divisor = self.begin_read("full_grad", Some(param))?;
        let mut grad = self.full_field(param, Field::Grad)?;
        grad.iter_mut().for_each(|grad| divide(grad.view_mut(), divisor));
        Ok(grad)
    }

    /// Replaces the whole gradient of a parameter, before clipping; a collective call in which each
    /// rank takes its part of the values that it was given: all ranks that hold the parameter give
    /// the same. A parameter that nobody used is then updated too.
    ///
    /// # Errors
    ///
    /// On every rank, if a rank gives another number of elements, or a dtype that the accumulator
    /// would round.
    pub fn set_full_grad(&mut self, param: ParamId, values: View<'_>) -> Result<(), EngineError> {
        let given = self.check_values(param, Field::Grad, values);
        let of = Of { param: Some(param), told: self.told_of(Field::Grad, values) };
        self.begin_edit("set_full_grad", of, given)?;
        self.write_grad(param, values);
        Ok(())
    }

    /// Edits the gradients that this rank's optimizer reads, element by element: `edit` is given
    /// the parameter, which of its elements they are, and their values. A collective call, but no
    /// gradient travels. Parameters that no rank used have none to edit. Where several ranks update
    /// the same elements (in stage 0, and along axes of the mesh that a parameter is replicated
    /// over), all of them must edit alike: it is not checked, and their weights would part. An edit
    /// that removes an overflow makes the window count as clean for a dynamic loss scale.
    pub fn map_grads(
        &mut self,
        mut edit: impl FnMut(ParamId, Range<usize>, ViewMut<'_>),
    ) -> Result<(), EngineError> {
        self.begin_edit("map_grads", None, Ok(()))?;
        let WindowState::Reduced(reduced) = &self.window.state else {
            unreachable!("begin_edit() leaves a reduced window")
        };
        for bucket in &mut self.buckets {
            bucket.each_owned_grad(|param, range, values| {
                if reduced.used(param) {
                    edit(param, range, values);
                }
            });
        }
        Ok(())
    }

    /// The part of a gradient that this rank's optimizer reads; a collective call. `None` for a
    /// frozen parameter.
    pub fn local_grad(&mut self, param: ParamId) -> Result<Option<Local<'_>>, EngineError> {
        let divisor = self.begin_read("local_grad", Some(param))?;
        Ok(self.local_field(param, Field::Grad)?.map(|local| local.divided(divisor)))
    }

    /// Replaces the part of a gradient that this rank's optimizer reads; a collective call, for
    /// which each rank hands in as many elements as [`local_grad`](Self::local_grad) gave it. Ranks
    /// that update the same elements give the same, as for [`map_grads`](Self::map_grads).
    pub fn set_local_grad(&mut self, param: ParamId, values: View<'_>) -> Result<(), EngineError> {
        let range = self.check_local_values(param, Field::Grad, values);
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
    /// exchange. It is that of the whole tensor where ranks hold parts of one or tensors of their
    /// own, as [`full_grads`](Self::full_grads) rebuilds it with [`Scope::Global`](crate::Scope).
    pub fn grad_norms(&mut self) -> Result<GradNorms, EngineError> {
        let divisor = self.begin_read("grad_norms", None)?;
        let norm = self.options.norm;
        let mut parts = vec![0.0; self.specs.len()];
        for piece in self.measure(norm, divisor).into_iter().filter(|piece| piece.counts) {
            norm.add(piece.measured, &mut parts[piece.param.0]);
        }
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_le_bytes()).collect();
        let told = self.groups.exchange(Message::NormParts, "grad_norms", &bytes);
        let told = told.map_err(|error| self.fail(error))?;
        let part = |rank: &Vec<u8>, param: usize| {
            let bytes = &rank[8 * param..8 * (param + 1)];
            f64::from_le_bytes(bytes.try_into().expect("a slice of eight bytes"))
        };
        let of = |(index, spec): (usize, &ParamSpec)| {
            spec.trainable.then(|| norm.of_parts(told.iter().map(|rank| part(rank, index))))
        };
        Ok(self.specs.iter().enumerate().map(of).collect())
    }

    /// Begins a call that only looks. Returns what gradients are still to be divided by.
    pub(crate) fn begin_read(
        &mut self,
        call: &str,
        param: Option<ParamId>,
    ) -> Result<f32, EngineError> {
        let given = param.map_or(Ok(()), |param| self.check_param(param));
        self.begin_access(call, param, given)?;
        let mut dtypes = self.buckets.iter().filter_map(Bucket::grad_dtype);
        if dtypes.all(|dtype| dtype == DType::F32) {
            self.divide_window(1.0);
        }
        match &self.window.state {
            WindowState::Reduced(reduced) => Ok(reduced.divisor()),
            _ => unreachable!("begin_access() leaves a reduced window"),
        }
    }

    /// Begins a call that gives gradients other values.
    pub(crate) fn begin_edit<T>(
        &mut self,
        call: &str,
        of: impl Into<Of>,
        given: Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let given = self.begin_access(call, of, given)?;
        self.divide_window(1.0);
        Ok(given)
    }

    /// Refuses the call at the wrong time, if a rank refuses what it was `given`, or if the ranks
    /// call different things; then reduces the window's gradients.
    fn begin_access<T>(
        &mut self,
        call: &str,
        of: impl Into<Of>,
        given: Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.check_alive()?;
        let given = given.and_then(|given| self.check_ready().map(|()| given));
        let given = self.agree_call(call, of, given)?;
        self.reduce_window(call, false)?;
        Ok(given)
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
                let n = n + usize::from(ended);
                // A caller who ends windows has asked for one more, whatever was configured.
                Err(EngineError::MidWindow { n, of: of.max(n + 1) })
            }
        }
    }

    /// Divides the gradients that this rank's optimizer reads, where they lie, and by `more` too.
    pub(crate) fn divide_window(&mut self, more: f32) {
        let WindowState::Reduced(reduced) = &mut self.window.state else { return };
        let divisor = reduced.divisor() * more;
        reduced.divided();
        for bucket in &mut self.buckets {
            bucket.each_owned_grad(|_, _, values| divide(values, divisor));
        }
    }

    /// Writes this rank's part of a gradient that was checked.
    pub(crate) fn write_grad(&mut self, param: ParamId, values: View<'_>) {
        let (at, owned) = self.owned_of(param).expect("only a trained parameter passes the check");
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

pub(crate) fn divide(values: ViewMut<'_>, divisor: f32) {
    if divisor != 1.0 {
        kernels::divide(values, divisor);
    }
}
