//! The gradients of a whole model at once: a few collectives, however many parameters there are.
//!
//! Buckets of one process group and one accumulation dtype are gathered together. Where tensors are
//! to be rebuilt from the parts that ranks of the mesh hold, these parts are gathered together too,
//! and laid out as the whole tensors are.

use std::collections::BTreeSet;

use oxizero_comm::{CommError, OwnShard};
use oxizero_core::{Axes, DType, Numel, ParamId, ParamSpec, Placement, Rank};
use oxizero_device::{Buffer, View, kernels};

use crate::access::divide;
use crate::bucket::{Bucket, Field};
use crate::groups::{Message, differing};
use crate::model_grads::{Memory, ModelGrads, Scope, Stretch};
use crate::window::WindowState;
use crate::{Engine, EngineError};

impl Engine {
    /// The whole gradients of all parameters; a collective call, of one collective for each process
    /// group and dtype of accumulators.
    ///
    /// [`Scope::DataParallel`] gathers over the groups that gradients are reduced over, and gives
    /// each rank the tensors of its [`ParamSpec`]s; [`Scope::Global`] also
    /// rebuilds those that the ranks of the mesh hold in parts.
    ///
    /// May be called between the last `backward_end` of a window and its step; the window takes no
    /// more gradients then. The copies are the caller's, and in no plan: see [`ModelGrads::bytes`].
    ///
    /// # Errors
    ///
    /// On every rank, [`NotReady`](EngineError::NotReady), [`MidWindow`](EngineError::MidWindow) or
    /// [`Consumed`](EngineError::Consumed) at another time, and
    /// [`CallsDiffer`](EngineError::CallsDiffer) where ranks ask for different things.
    pub fn full_grads(&mut self, scope: Scope) -> Result<ModelGrads, EngineError> {
        let mut grads = ModelGrads::default();
        self.full_grads_into(scope, &mut grads)?;
        Ok(grads)
    }

    /// The same, in the memory of `grads` where it fits, such as that of an earlier window: page
    /// faults of fresh memory take longer than the copy. After an error `grads` may be empty. Parts
    /// from which whole tensors are rebuilt pass through other memory, which is freed.
    pub fn full_grads_into(
        &mut self,
        scope: Scope,
        grads: &mut ModelGrads,
    ) -> Result<(), EngineError> {
        let divisor = self.begin_read(&format!("full_grads {scope}"), None)?;
        let mut memory = std::mem::take(grads).into_memory();
        let shape = |spec: &ParamSpec| match scope {
            Scope::DataParallel => spec.shape.clone(),
            Scope::Global => self.mesh().whole_shape(spec),
        };
        let mut new = ModelGrads::new(scope, &self.specs, shape, |param| self.is_used(param));
        for (reduced, dtype) in self.keys(|bucket| Some(bucket.spec().sharing.reduced)) {
            let members = self.members(reduced, dtype);
            let numel = members.iter().map(|index| self.numel(*index)).sum();
            let flat = memory.take(numel, dtype, &self.storage);
            let mut flat = self.gather_grads(reduced, &members, flat)?;
            divide(flat.view_mut(), divisor);
            self.place(&members, new.add(flat), &mut new);
        }
        if scope == Scope::Global {
            let has_parts = |axes: &Axes| !axes.is_empty();
            let parts = self.keys(|bucket| Some(bucket.spec().sharing.parts()).filter(has_parts));
            for (parts, dtype) in parts {
                self.rebuild(parts, dtype, &mut new, &mut memory)?;
            }
            new.trim();
        }
        *grads = new;
        Ok(())
    }

    /// Replaces the gradients of all parameters that `grads` has, of whatever window, before
    /// clipping; a collective call. Of whole tensors, each rank takes its part. All ranks that hold
    /// a parameter give the same. One that nobody used in the window that they were read from
    /// is left as it is, unless it was [written](ModelGrads::get_mut).
    ///
    /// # Errors
    ///
    /// On every rank, if ranks give the gradients of other parameters, or of another model.
    pub fn set_full_grads(&mut self, grads: &ModelGrads) -> Result<(), EngineError> {
        let given: Vec<_> = grads.iter().filter(|(param, _)| grads.is_used(*param)).collect();
        let fine =
            given.iter().try_for_each(|(param, values)| self.check_given(grads, *param, *values));
        self.begin_edit(&format!("set_full_grads {}", grads.scope()), None, fine)?;
        self.agree_given(&given.iter().map(|(param, _)| *param).collect::<Vec<_>>())?;
        for (param, values) in given {
            match grads.scope() {
                Scope::DataParallel => self.write_grad(param, values),
                Scope::Global => {
                    let part = self.part_of(param, values);
                    self.write_grad(param, part.view());
                }
            }
        }
        Ok(())
    }

    /// Refuses gradients that are given by some of the ranks that hold the same tensor.
    fn agree_given(&mut self, given: &[ParamId]) -> Result<(), EngineError> {
        let mut own = vec![0; self.specs.len()];
        given.iter().for_each(|param| own[param.0] = 1);
        let told = self.groups.exchange(Message::Given, "set_full_grads", &own);
        let told = told.map_err(|error| self.fail(error))?;
        for (index, spec) in self.specs.iter().enumerate() {
            let gives = |rank: Rank| told[rank.0][index] == 1;
            let firsts = self.groups.same_tensor(self.mesh().sharing(spec));
            if let Some((first, second)) = differing(firsts, gives) {
                let param = spec.name.clone();
                return Err(EngineError::GivenDiffer { param, first, second });
            }
        }
        Ok(())
    }

    fn is_used(&self, param: ParamId) -> bool {
        match &self.window.state {
            WindowState::Reduced(reduced) => reduced.used(param),
            _ => false,
        }
    }

    /// Refuses a gradient that is not this engine's.
    fn check_given(
        &self,
        grads: &ModelGrads,
        param: ParamId,
        values: View<'_>,
    ) -> Result<(), EngineError> {
        self.check_param(param)?;
        let spec = &self.specs[param.0];
        let shape = match grads.scope() {
            Scope::DataParallel => spec.shape.clone(),
            Scope::Global => self.mesh().whole_shape(spec),
        };
        let (name, given) = (grads.name(param), grads.shape(param));
        if name != Some(&spec.name) || given != Some(&shape) {
            return Err(EngineError::Param {
                param: spec.name.clone(),
                problem: format!(
                    "it has the shape {shape:?}, and the gradients' parameter {} is `{}` of {:?}: \
                     they are those of another model or mesh",
                    param.0,
                    name.unwrap_or_default(),
                    given.unwrap_or_default()
                ),
            });
        }
        self.check_fit(param, Field::Grad, Numel::of_shape(&shape), values)
    }

    /// This rank's part of a whole tensor.
    fn part_of(&self, param: ParamId, whole: View<'_>) -> Buffer {
        let (mesh, spec) = (self.mesh(), &self.specs[param.0]);
        let mut part = self.storage.buffer(spec.numel(), whole.dtype());
        let place = mesh.place(mesh.sharing(spec).parts(), self.groups.world().rank());
        for (run, at) in mesh.runs(spec, place) {
            kernels::cast(whole.range(at..at + run.len()), part.range_mut(run));
        }
        part
    }

    /// The process groups, and the dtypes of accumulators, of trained buckets; ascending.
    pub(crate) fn keys(&self, axes: impl Fn(&Bucket) -> Option<Axes>) -> BTreeSet<(Axes, DType)> {
        let key = |bucket: &Bucket| Some((axes(bucket)?, bucket.grad_dtype()?));
        self.buckets.iter().filter_map(key).collect()
    }

    /// The buckets of a process group and dtype; those that are shared alike beside each other.
    pub(crate) fn members(&self, reduced: Axes, dtype: DType) -> Vec<usize> {
        let is_member = |index: &usize| {
            let bucket = &self.buckets[*index];
            bucket.spec().sharing.reduced == reduced && bucket.grad_dtype() == Some(dtype)
        };
        let mut members: Vec<_> = (0..self.buckets.len()).filter(is_member).collect();
        members.sort_by_key(|index| self.buckets[*index].spec().sharing.parts());
        members
    }

    /// Fills `flat` with the whole gradients of these buckets, one after the other.
    fn gather_grads(
        &mut self,
        reduced: Axes,
        members: &[usize],
        mut flat: Buffer,
    ) -> Result<Buffer, EngineError> {
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
        let take = |index: &usize| {
            let bucket = &mut self.buckets[*index];
            bucket.take(Field::Grad, bucket.shard())
        };
        let shards = members.iter().filter_map(take).collect();
        let (shards, flat) = self.gather_many(reduced, shards, flat)?;
        for (index, shard) in members.iter().zip(shards) {
            self.buckets[*index].give(Field::Grad, shard);
        }
        Ok(flat)
    }

    /// Several all-gathers over the ranks along `axes`, in one collective.
    pub(crate) fn gather_many(
        &mut self,
        axes: Axes,
        shards: Vec<OwnShard>,
        full: Buffer,
    ) -> Result<(Vec<OwnShard>, Buffer), EngineError> {
        let gathered = self.groups.over(axes).all_gather_many(shards, full);
        gathered.and_then(|handle| handle.wait()).map_err(|error: CommError| self.fail(error))
    }

    /// Says where in flat copy `flat` of these buckets each parameter lies.
    fn place(&self, members: &[usize], flat: usize, grads: &mut ModelGrads) {
        let mut start = 0;
        for index in members {
            let spec = self.buckets[*index].spec();
            for (slot, param) in spec.params.iter().enumerate() {
                let at = spec.layout.slot(slot);
                grads.place(*param, flat, start + at.start..start + at.end);
            }
            start += self.numel(*index).0;
        }
    }

    /// Puts the tensors together whose parts lie along `parts`, with accumulators of `dtype`.
    fn rebuild(
        &mut self,
        parts: Axes,
        dtype: DType,
        grads: &mut ModelGrads,
        memory: &mut Memory,
    ) -> Result<(), EngineError> {
        let is_part = |param: &ParamId| {
            let bucket = &self.buckets[self.params[param.0].bucket.0];
            bucket.spec().sharing.parts() == parts && bucket.grad_dtype() == Some(dtype)
        };
        let params: Vec<_> = (0..self.specs.len()).map(ParamId).filter(is_part).collect();
        let ranks = self.mesh().size_over(parts);
        let (stretches, gathered) = self.gather_parts(parts, (&params, dtype), grads)?;
        let whole_numel = |param: &ParamId| self.specs[param.0].numel() * ranks.get();
        let mut whole = memory.take(params.iter().map(whole_numel).sum(), dtype, &self.storage);
        let (mut start, mut places) = (0, Vec::with_capacity(params.len()));
        for param in params {
            for part in ranks.ranks() {
                let from = grads.gathered(param, part, &stretches);
                for (run, to) in self.mesh().runs(&self.specs[param.0], part) {
                    let to = start + to..start + to + run.len();
                    let from = from.start + run.start..from.start + run.end;
                    kernels::cast(gathered.range(from), whole.range_mut(to));
                }
            }
            let end = start + whole_numel(&param).0;
            places.push((param, start..end));
            start = end;
        }
        let flat = grads.add(whole);
        places.into_iter().for_each(|(param, all)| grads.place(param, flat, all));
        Ok(())
    }

    /// Gathers the parts of these parameters from all ranks along `parts`, stretch after stretch.
    fn gather_parts(
        &mut self,
        parts: Axes,
        (params, dtype): (&[ParamId], DType),
        grads: &mut ModelGrads,
    ) -> Result<(Vec<Stretch>, Buffer), EngineError> {
        let (stretches, numel) = grads.stretches(params, self.mesh().size_over(parts));
        let shards = stretches.iter().map(|stretch| stretch.shard(grads)).collect();
        let gathered = self.storage.buffer(numel, dtype);
        let (shards, gathered) = self.gather_many(parts, shards, gathered)?;
        for (stretch, shard) in stretches.iter().zip(shards) {
            stretch.give_back(shard, grads);
        }
        Ok((stretches, gathered))
    }

    fn numel(&self, bucket: usize) -> Numel {
        self.buckets[bucket].spec().layout.padded_numel()
    }
}
