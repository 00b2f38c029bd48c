//! Whole master weights and optimizer states, read and written between steps; and what reading and
//! writing a parameter has in common.
//!
//! Every rank makes the same calls in the same order.

use std::ops::Range;

use oxizero_core::{DType, Event, Numel, ParamId, Placement, Rank};
use oxizero_device::{Buffer, View, kernels};

use crate::access::Local;
use crate::bucket::{Field, overlap};
use crate::engine::ParamState;
use crate::groups::Message;
use crate::observer::Span;
use crate::setup::fingerprint;
use crate::written::others;
use crate::{Engine, EngineError};

/// Bytes that ranks tell each other of a call: its fingerprint, whether they refuse it, what tells
/// its values from others, the parameter, and the beginning of its name.
const CALL_BYTES: usize = 64;
/// Where in it is what tells the values of a call from others; zeros if nothing does.
const VALUES: Range<usize> = 9..17;
/// Where the parameter's index is, counted from 1; 0 if it is about none.
const PARAM: Range<usize> = 17..25;

/// What a call is about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Of {
    /// The parameter, if it is about one.
    pub(crate) param: Option<ParamId>,
    /// What tells the values that the rank is given from others, where ranks that hold the same of
    /// the parameter are to be given the same.
    pub(crate) told: Option<u64>,
}

impl From<Option<ParamId>> for Of {
    fn from(param: Option<ParamId>) -> Self {
        Self { param, told: None }
    }
}

impl From<ParamId> for Of {
    fn from(param: ParamId) -> Self {
        Some(param).into()
    }
}

impl Engine {
    /// The whole f32 master weights of a parameter, in the shape of its
    /// [`ParamSpec`](crate::ParamSpec): of a tensor that the mesh splits, this rank's part. A
    /// collective call. `None` for a frozen one.
    pub fn full_param(&mut self, param: ParamId) -> Result<Option<Buffer>, EngineError> {
        self.begin_call("full_param", param, Ok(()))?;
        self.full_field(param, Field::Master)
    }

    /// Replaces the master weights of a parameter, and with them its model weights; a collective
    /// call in which each rank takes its part of the values that it was given: all ranks that hold
    /// the same of the parameter give the same, or each of them has
    /// [`ValuesDiffer`](EngineError::ValuesDiffer).
    pub fn set_full_param(&mut self, param: ParamId, values: View<'_>) -> Result<(), EngineError> {
        self.check_alive()?;
        let given = self.check_values(param, Field::Master, values);
        let given = given.and_then(|()| self.check_bucket_exclusive(param));
        let told = self.told_of(Field::Master, values);
        self.agree_call("set_full_param", Of { param: Some(param), told }, given)?;
        self.run(Event::Edit)?;
        let (at, _) = self.owned_of(param)?;
        self.written.replaced(param);
        self.write_weights(param, at, values)
    }

    /// The part of the f32 master weights that this rank's optimizer updates. `None` for a frozen
    /// parameter.
    pub fn local_param(&mut self, param: ParamId) -> Result<Option<Local<'_>>, EngineError> {
        self.check_alive()?;
        self.check_param(param)?;
        self.settle_param(param)?;
        self.local_field(param, Field::Master)
    }

    /// Replaces the part of the master weights that this rank's optimizer updates, and with it the
    /// model weights; a collective call, for which each rank hands in as many elements as
    /// [`local_param`](Self::local_param) gave it. Ranks that update the same elements give the
    /// same, which the next step checks.
    pub fn set_local_param(&mut self, param: ParamId, values: View<'_>) -> Result<(), EngineError> {
        self.check_alive()?;
        let range = self.check_local_values(param, Field::Master, values);
        let given = range.and_then(|at| self.check_bucket_exclusive(param).map(|()| at));
        let at = self.agree_call("set_local_param", Some(param), given)?;
        self.run(Event::Edit)?;
        self.note_written(param);
        self.write_weights(param, at, values)
    }

    /// Writes elements `at` of the parameter's bucket, and tells the others.
    fn write_weights(
        &mut self,
        param: ParamId,
        at: Range<usize>,
        values: View<'_>,
    ) -> Result<(), EngineError> {
        let id = self.params[param.0].bucket;
        self.buckets[id.0].write_weights(at, values);
        let seen = self.groups.observed().of(Span::Publish(id));
        self.on_bucket(id, |bucket, comm| {
            bucket.publish(comm, seen)?;
            bucket.settle()
        })
    }

    /// A whole f32 state that the optimizer keeps of a parameter, by its name in torch such as
    /// `exp_avg`, in the same shape; a collective call. `None` for a frozen parameter.
    pub fn full_state(
        &mut self,
        param: ParamId,
        name: &str,
    ) -> Result<Option<Buffer>, EngineError> {
        let state = self.state(name);
        let state = self.begin_call(&format!("full_state {name}"), param, state)?;
        self.full_field(param, state)
    }

    /// Replaces a state of a parameter; a collective call in which each rank takes its part of the
    /// values that it was given.
    pub fn set_full_state(
        &mut self,
        param: ParamId,
        name: &str,
        values: View<'_>,
    ) -> Result<(), EngineError> {
        let given = self.state_index(name);
        let given = given.and_then(|index| {
            self.check_values(param, Field::State(index), values).map(|()| index)
        });
        let told = self.told_of(Field::State(0), values);
        let of = Of { param: Some(param), told };
        let index = self.begin_call(&format!("set_full_state {name}"), of, given)?;
        let (at, owned) = self.owned_of(param)?;
        if let Some(range) = overlap(&at, &owned) {
            let in_param = range.start - at.start..range.end - at.start;
            self.write_state(param, index, range, values.range(in_param));
        }
        Ok(())
    }

    /// Replaces the part of a state that this rank's optimizer updates; a collective call, for
    /// which each rank hands in as many elements as [`local_state`](Self::local_state) gave it.
    pub fn set_local_state(
        &mut self,
        param: ParamId,
        name: &str,
        values: View<'_>,
    ) -> Result<(), EngineError> {
        let given = self.state_index(name);
        let given = given.and_then(|index| {
            Ok((index, self.check_local_values(param, Field::State(index), values)?))
        });
        let (index, range) = self.begin_call(&format!("set_local_state {name}"), param, given)?;
        if !range.is_empty() {
            self.write_state(param, index, range, values);
        }
        Ok(())
    }

    fn write_state(&mut self, param: ParamId, index: usize, range: Range<usize>, values: View<'_>) {
        let id = self.params[param.0].bucket;
        if let Some(target) = self.buckets[id.0].state_mut(index, range) {
            kernels::cast(values, target);
        }
    }

    /// The part of a state that this rank's optimizer updates. `None` for a frozen parameter.
    pub fn local_state(
        &mut self,
        param: ParamId,
        name: &str,
    ) -> Result<Option<Local<'_>>, EngineError> {
        self.check_alive()?;
        let state = self.state(name)?;
        self.check_param(param)?;
        self.local_field(param, state)
    }

    fn state(&self, name: &str) -> Result<Field, EngineError> {
        self.state_index(name).map(Field::State)
    }

    fn state_index(&self, name: &str) -> Result<usize, EngineError> {
        let names = self.hyper.setup.rule.state_names();
        let index = names.iter().position(|known| *known == name);
        index.ok_or_else(|| EngineError::UnknownState { name: name.into(), kept: names.join(", ") })
    }

    fn check_bucket_exclusive(&mut self, param: ParamId) -> Result<(), EngineError> {
        let id = self.params[param.0].bucket;
        match self.buckets[id.0].is_exclusive() {
            true => Ok(()),
            false => Err(EngineError::WeightsInUse { param: self.specs[param.0].name.clone() }),
        }
    }

    fn begin_call<T>(
        &mut self,
        call: &str,
        of: impl Into<Of>,
        given: Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.check_alive()?;
        let of = of.into();
        let known = of.param.map_or(Ok(()), |param| self.check_param(param));
        let given = self.agree_call(call, of, given.and_then(|given| known.map(|()| given)))?;
        of.param.map_or(Ok(()), |param| self.settle_param(param))?;
        Ok(given)
    }

    /// Waits for weights of the parameter's bucket that are on their way.
    fn settle_param(&mut self, param: ParamId) -> Result<(), EngineError> {
        let id = self.params[param.0].bucket;
        self.on_bucket(id, |bucket, _| bucket.settle())
    }

    /// Compares a call across ranks; `given` is what this rank was given, or why it refuses that.
    /// An error of one rank is an error of all, each of which knows it before anything is sent.
    pub(crate) fn agree_call<T>(
        &mut self,
        call: &str,
        of: impl Into<Of>,
        given: Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let Of { param, told: values } = of.into();
        let mut words = [0; CALL_BYTES];
        words[8] = u8::from(given.is_err());
        words[VALUES].copy_from_slice(&values.unwrap_or_default().to_le_bytes());
        words[PARAM].copy_from_slice(&param.map_or(0, |param| param.0 as u64 + 1).to_le_bytes());
        let text = &call[..call.floor_char_boundary(CALL_BYTES - PARAM.end)];
        words[PARAM.end..][..text.len()].copy_from_slice(text.as_bytes());
        let call = self.call_of(call, param.map(|param| param.0));
        words[..8].copy_from_slice(&fingerprint(&call).to_le_bytes());
        let told = self.groups.exchange(Message::Call, &call, &words);
        let told = told.map_err(|error| self.fail(error))?;
        let given = given?; // this rank's own reason is the best one
        let ranks = || told.iter().zip((0..).map(Rank));
        if let Some((_, rank)) = ranks().find(|(other, _)| other[8] != 0) {
            return Err(EngineError::PeerRefused { rank });
        }
        if let Some((other, rank)) = ranks().find(|(other, _)| other[..8] != words[..8]) {
            let text = other[PARAM.end..].split(|byte| *byte == 0).next().unwrap_or_default();
            let param = u64::from_le_bytes(other[PARAM].try_into().expect("eight bytes"));
            let param = (param as usize).checked_sub(1);
            let other = self.call_of(&String::from_utf8_lossy(text), param);
            return Err(EngineError::CallsDiffer { rank, call, other });
        }
        let axes = param.map(|param| self.sharing(param).copies());
        let firsts = axes.map_or(&[][..], |axes| self.groups.firsts(axes));
        match others(firsts, |rank| &told[rank.0][VALUES]) {
            Some((first, others)) => Err(EngineError::ValuesDiffer { call, first, others }),
            None => Ok(given),
        }
    }

    /// A call about a parameter, as errors name it.
    fn call_of(&self, call: &str, param: Option<usize>) -> String {
        match param.map(|index| (index, self.specs.get(index))) {
            Some((_, Some(spec))) => format!("{call} of `{}`", spec.name),
            Some((index, None)) => format!("{call} of parameter {index}"),
            None => call.to_owned(),
        }
    }

    /// Takes part in a collective call that this rank's front-end refuses, such as a write of
    /// values of another shape, so that it is an error on every rank. `call` is the name of the
    /// method, and for a state the state's name after a space. Returns `why`, or the error of a
    /// collective.
    pub fn refuse(&mut self, call: &str, param: Option<ParamId>, why: EngineError) -> EngineError {
        let refused =
            self.check_alive().and_then(|()| self.agree_call(call, param, Err::<(), _>(why)));
        refused.expect_err("a refusal is not agreed to")
    }

    pub(crate) fn check_param(&self, param: ParamId) -> Result<(), EngineError> {
        let (index, count) = (param.0, self.specs.len());
        let known = index < count;
        known.then_some(()).ok_or(EngineError::Unknown { what: "parameter", index, count })
    }

    /// Refuses values that are not a field of a whole trained parameter.
    pub(crate) fn check_values(
        &self,
        param: ParamId,
        field: Field,
        values: View<'_>,
    ) -> Result<(), EngineError> {
        self.check_param(param)?;
        self.check_fit(param, field, self.specs[param.0].numel(), values)
    }

    /// The elements that this rank's optimizer updates, if the values are these elements'.
    pub(crate) fn check_local_values(
        &self,
        param: ParamId,
        field: Field,
        values: View<'_>,
    ) -> Result<Range<usize>, EngineError> {
        let (at, owned) = self.owned_of(param)?;
        let range = overlap(&at, &owned).unwrap_or(at.start..at.start);
        self.check_fit(param, field, Numel(range.len()), values)?;
        Ok(range)
    }

    /// Refuses values that are not so many, or that would be rounded where they are stored.
    pub(crate) fn check_fit(
        &self,
        param: ParamId,
        field: Field,
        numel: Numel,
        values: View<'_>,
    ) -> Result<(), EngineError> {
        self.owned_of(param)?;
        let (what, param, id) =
            (field.name(), self.specs[param.0].name.clone(), self.params[param.0].bucket);
        if values.numel() != numel {
            let (expected, got) = (numel, values.numel());
            return Err(EngineError::WrongNumel { what, param, expected, got });
        }
        match self.buckets[id.0].dtype_of(field) {
            Some(expected) if ![DType::F32, values.dtype()].contains(&expected) => {
                Err(EngineError::WrongDType { what, param, expected, got: values.dtype() })
            }
            _ => Ok(()),
        }
    }

    /// Where a trained parameter lies in its bucket, and what this rank's optimizer updates there.
    pub(crate) fn owned_of(
        &self,
        param: ParamId,
    ) -> Result<(Range<usize>, Range<usize>), EngineError> {
        self.check_param(param)?;
        let state = &self.params[param.0];
        let bucket = &self.buckets[state.bucket.0];
        let owned = bucket.owned().ok_or_else(|| EngineError::Param {
            param: self.specs[param.0].name.clone(),
            problem: "it is frozen, and has no gradient, master weights or states".into(),
        })?;
        Ok((bucket.spec().layout.slot(state.slot), owned))
    }

    pub(crate) fn local_field(
        &self,
        param: ParamId,
        field: Field,
    ) -> Result<Option<Local<'_>>, EngineError> {
        let state = &self.params[param.0];
        let bucket = &self.buckets[state.bucket.0];
        let Some(owned) = bucket.owned() else { return Ok(None) };
        let at = bucket.spec().layout.slot(state.slot);
        let range = overlap(&at, &owned).unwrap_or(owned.start..owned.start);
        let elements = match range.is_empty() {
            true => 0..0,
            false => range.start - at.start..range.end - at.start,
        };
        Ok(bucket.field(field, range).map(|values| Local::new(elements, values)))
    }

    /// A whole field of one parameter, on every rank.
    pub(crate) fn full_field(
        &mut self,
        param: ParamId,
        field: Field,
    ) -> Result<Option<Buffer>, EngineError> {
        let ParamState { bucket: id, slot, .. } = self.params[param.0];
        let bucket = &mut self.buckets[id.0];
        let at = bucket.spec().layout.slot(slot);
        if self.options.stage.optim() == Placement::Replicated {
            return Ok(bucket.field(field, at).map(Buffer::copy_of));
        }
        let shard = bucket.shard();
        let own = overlap(&at, &shard).unwrap_or(shard.start..shard.start);
        let reduced = bucket.spec().sharing.reduced;
        let Some(own) = bucket.take(field, own) else { return Ok(None) };
        let whole = self.storage.buffer(Numel(at.len()), own.buffer.dtype());
        let (shards, whole) = self.gather_many(reduced, vec![own], whole)?;
        for shard in shards {
            self.buckets[id.0].give(field, shard);
        }
        Ok(Some(whole))
    }
}
