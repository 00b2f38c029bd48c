//! Reads a checkpoint, whatever world and engine wrote it: each rank what it is to hold.

use std::collections::{HashMap, HashSet};

use oxizero_checkpoint::{
    Checkpoint, CheckpointError, Dtype, Param, Role, RunFolder, Tensor, Training,
};
use oxizero_core::{BucketId, DType, LossScale, OptimGroup, ParamId, Part, Rank};
use oxizero_device::{View, kernels};

use crate::groups::Message;
use crate::observer::Span;
use crate::options::GroupOptions;
use crate::setup::check_group;
use crate::{Engine, EngineError};

/// What of a checkpoint is loaded, and how strictly. The same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// What is loaded.
    pub what: What,
    /// Whether names may differ.
    pub names: Names,
}

/// What of a checkpoint is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum What {
    /// All: training goes on where it was.
    #[default]
    All,
    /// Weights, which master weights follow. Optimizer states, counts of steps, learning rates and
    /// the loss scale stay as they are.
    Weights,
}

/// Whether a checkpoint has the engine's tensors by name, and no others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Names {
    /// Or it is refused.
    #[default]
    Strict,
    /// What is missing stays as it is, what is too much is left out, and both are listed.
    Listed,
}

/// What was loaded.
#[derive(Debug)]
pub struct Loaded {
    /// The checkpoint, for what the engine does not need of it: what the caller added to its
    /// manifest, and the model's buffers.
    pub checkpoint: Checkpoint,
    /// What the engine has and the checkpoint has not.
    pub missing: Vec<String>,
    /// What the checkpoint has and the engine has not.
    pub unexpected: Vec<String>,
}

/// Which tensors of a checkpoint an engine takes.
#[derive(Default)]
struct Wanted {
    /// By parameter: what it is called in the checkpoint, and the tensor of its weights.
    weights: Vec<Option<(usize, usize)>>,
    /// By parameter and state.
    states: Vec<Vec<Option<usize>>>,
    groups: bool,
    missing: Vec<String>,
    unexpected: Vec<String>,
}

impl Engine {
    /// Takes the state of a checkpoint of `run`: the one called `name`, or the latest; a collective
    /// call. It may have been saved by any number of ranks, in any stage, bucketing, precision of
    /// model weights, mesh and back end. A window that has begun is given up. Memory of at most
    /// 1 MiB is used beside the engine's.
    ///
    /// Where nothing else changed, training goes on bit for bit as it would have.
    ///
    /// # Errors
    ///
    /// On every rank, if one of them cannot read its part ([`EngineError::Checkpoint`] there, and
    /// [`EngineError::PeerRefused`] on the others), or with [`EngineError::NamesDiffer`]. The
    /// engine is as it was, unless elements turned out to be damaged while they were read: then
    /// every call is refused with [`EngineError::HalfLoaded`] until another load succeeds.
    pub fn load(
        &mut self,
        run: &RunFolder,
        name: Option<&str>,
        options: LoadOptions,
    ) -> Result<Loaded, EngineError> {
        self.load_checked(run, name, options, &mut |_| Ok(()))
    }

    /// The same, of a checkpoint that each rank's `check` has looked at, before anything is
    /// written: there the caller reads what the engine does not need of it.
    ///
    /// # Errors
    ///
    /// Those of [`load`](Self::load), and of `check`: on every rank, if that of one of them fails.
    pub fn load_checked(
        &mut self,
        run: &RunFolder,
        name: Option<&str>,
        options: LoadOptions,
        check: &mut dyn FnMut(&mut Checkpoint) -> Result<(), EngineError>,
    ) -> Result<Loaded, EngineError> {
        if let Some(error) = &self.failed {
            return Err(EngineError::Comm(error.clone()));
        }
        self.finish_save()?;
        let name = self.agree_name(run, name)?;
        let opened = run.open(Some(&name)).map_err(EngineError::from);
        let opened = opened.and_then(|mut checkpoint| {
            let wanted = self.wanted(&mut checkpoint, options)?;
            check(&mut checkpoint)?;
            Ok((checkpoint, wanted))
        });
        let opened = opened.and_then(|opened| self.check_lent_out().map(|()| opened));
        let (mut checkpoint, wanted) = self.agree_call(&format!("load `{name}`"), None, opened)?;
        self.half_loaded = false;
        self.discard_window()?;
        self.half_loaded = true;
        let read = self.read_all(&mut checkpoint, &wanted)?;
        self.agree_done("load: read", read)?;
        self.half_loaded = false;
        let loaded = wanted.weights.iter().zip((0..).map(ParamId)).filter(|(of, _)| of.is_some());
        loaded.for_each(|(_, param)| self.written.replaced(param));
        if options.what == What::All {
            self.resume(&checkpoint, &wanted)?;
        }
        let Wanted { missing, unexpected, .. } = wanted;
        Ok(Loaded { checkpoint, missing, unexpected })
    }

    /// The name of the latest checkpoint of `run`, as rank 0 finds it; `None` where nothing says
    /// which it is. A collective call.
    ///
    /// # Errors
    ///
    /// On every rank, if rank 0 cannot read it.
    pub fn latest_checkpoint(&mut self, run: &RunFolder) -> Result<Option<String>, EngineError> {
        if let Some(error) = &self.failed {
            return Err(EngineError::Comm(error.clone()));
        }
        self.finish_save()?;
        let found = self.on_first_rank(|| match run.latest() {
            Err(CheckpointError::NoCheckpoint { .. }) => Ok(String::new()),
            found => found,
        });
        let found = self.agree_done("load the latest", found.unwrap_or(Ok(String::new())))?;
        let name = self.tell_name(&found)?;
        Ok((!name.is_empty()).then_some(name))
    }

    /// The checkpoint's name, which rank 0 looks up.
    fn agree_name(&mut self, run: &RunFolder, name: Option<&str>) -> Result<String, EngineError> {
        let found = match name {
            Some(name) => Ok(name.to_owned()),
            None if self.groups.world().rank() == Rank(0) => run.latest(),
            None => Ok(String::new()),
        };
        let found = self.agree_done(&format!("load {}", name.unwrap_or("the latest")), found)?;
        self.tell_name(&found)
    }

    /// Rank 0's name.
    fn tell_name(&mut self, own: &str) -> Result<String, EngineError> {
        let mut bytes = vec![0; NAME_BYTES];
        let len = own.len().min(NAME_BYTES - 1);
        bytes[0] = len as u8;
        bytes[1..=len].copy_from_slice(&own.as_bytes()[..len]);
        let told = self.groups.exchange(Message::Name, "load", &bytes);
        let told = told.map_err(|error| self.fail(error))?;
        let first = &told[0];
        Ok(String::from_utf8_lossy(&first[1..=usize::from(first[0])]).into_owned())
    }

    /// Refuses to write weights that somebody views.
    fn check_lent_out(&mut self) -> Result<(), EngineError> {
        let lent = self
            .buckets
            .iter_mut()
            .find_map(|bucket| (!bucket.is_exclusive()).then(|| bucket.spec().params[0]));
        match lent {
            Some(param) => {
                Err(EngineError::WeightsInUse { param: self.specs[param.0].name.clone() })
            }
            None => Ok(()),
        }
    }

    /// Finds what is to be read, and checks all of it that can be checked before.
    fn wanted(
        &self,
        checkpoint: &mut Checkpoint,
        options: LoadOptions,
    ) -> Result<Wanted, EngineError> {
        let mut wanted = self.find_tensors(checkpoint, options.what);
        if options.what == What::All {
            let training = &checkpoint.manifest().training;
            check_training(training)?;
            wanted.groups = training.groups.len() == self.hyper.setup.groups.len();
            if !wanted.groups {
                let (there, here) = (training.groups.len(), self.hyper.setup.groups.len());
                wanted
                    .missing
                    .push(format!("the {here} optimizer groups, of which it has {there}"));
            }
        }
        if options.names == Names::Strict
            && !(wanted.missing.is_empty() && wanted.unexpected.is_empty())
        {
            let Wanted { missing, unexpected, .. } = wanted;
            return Err(EngineError::NamesDiffer { missing, unexpected });
        }
        for (param, tensor) in wanted.tensors() {
            check_fits(&checkpoint.manifest().tensors[tensor], &self.own_part(param))?;
        }
        checkpoint.check_files(wanted.tensors().map(|(_, tensor)| tensor))?;
        Ok(wanted)
    }

    fn find_tensors(&self, checkpoint: &Checkpoint, what: What) -> Wanted {
        let manifest = checkpoint.manifest();
        let mut by_name = HashMap::new();
        for (index, Param { name, aliases, .. }) in manifest.params.iter().enumerate() {
            by_name.extend(std::iter::once(name).chain(aliases).map(|name| (name.as_str(), index)));
        }
        let mut wanted = Wanted::default();
        let rule_states = self.hyper.setup.rule.state_names();
        for spec in &self.specs {
            let named = spec.names().find_map(|name| by_name.get(name)).copied();
            let name = named.map(|index| manifest.params[index].name.as_str());
            let weights = named.zip(name.and_then(|name| checkpoint.weights_of(name)));
            if weights.is_none() {
                wanted.missing.push(format!("the weights of `{}`", spec.name));
            }
            wanted.weights.push(weights);
            let kept = if spec.trainable && what == What::All { rule_states } else { &[] };
            let states = kept.iter().map(|state| {
                let role = Role::State((*state).into());
                let found = name.and_then(|name| checkpoint.find(&role, name));
                if found.is_none() {
                    wanted.missing.push(format!("{role} `{}`", spec.name));
                }
                found
            });
            wanted.states.push(states.collect());
        }
        let taken: HashSet<_> = wanted.tensors().map(|(_, tensor)| tensor).collect();
        let is_left = |(index, tensor): &(usize, &Tensor)| {
            let asked = match tensor.role {
                Role::Buffer => false,
                Role::State(_) => what == What::All,
                Role::Master | Role::Weights => true,
            };
            asked && !taken.contains(index)
        };
        let left = manifest.tensors.iter().enumerate().filter(is_left);
        wanted.unexpected = left.map(|(_, tensor)| tensor.to_string()).collect();
        wanted
    }

    /// Reads what this rank holds, bucket after bucket, and makes it known. A rank that cannot read
    /// takes part in the collectives all the same.
    fn read_all(
        &mut self,
        checkpoint: &mut Checkpoint,
        wanted: &Wanted,
    ) -> Result<Result<(), CheckpointError>, EngineError> {
        let mut outcome = Ok(());
        for id in (0..self.buckets.len()).map(BucketId) {
            if outcome.is_ok() {
                outcome = self.read_bucket(id, checkpoint, wanted);
            }
            let seen = self.groups.observed().of(Span::Publish(id));
            self.on_bucket(id, |bucket, comm| bucket.publish(comm, seen))?;
        }
        self.settle()?;
        Ok(outcome)
    }

    fn read_bucket(
        &mut self,
        id: BucketId,
        checkpoint: &mut Checkpoint,
        wanted: &Wanted,
    ) -> Result<(), CheckpointError> {
        let layout = self.buckets[id.0].spec().layout.clone();
        let pieces: Vec<_> = layout.pieces(self.buckets[id.0].held()).collect();
        for piece in pieces {
            let param = self.buckets[id.0].spec().params[piece.slot];
            let part = self.own_part(param);
            let bucket = &mut self.buckets[id.0];
            let start = layout.slot(piece.slot).start;
            let place = |at: usize, values: View<'_>| start + at..start + at + values.numel().0;
            if let Some((_, tensor)) = wanted.weights[param.0] {
                let dtype = loaded_dtype(&checkpoint.manifest().tensors[tensor]);
                checkpoint.read(tensor, (&part, piece.in_param.clone()), &mut |at, bytes| {
                    let values = View::of_bytes(bytes, dtype);
                    bucket.write_weights(place(at, values), values);
                })?;
            }
            for (state, tensor) in wanted.states[param.0].iter().enumerate() {
                let Some(tensor) = *tensor else { continue };
                let dtype = loaded_dtype(&checkpoint.manifest().tensors[tensor]);
                checkpoint.read(tensor, (&part, piece.in_param.clone()), &mut |at, bytes| {
                    let values = View::of_bytes(bytes, dtype);
                    if let Some(target) = bucket.state_mut(state, place(at, values)) {
                        kernels::cast(values, target);
                    }
                })?;
            }
        }
        Ok(())
    }

    /// Counts, learning rates and loss scale, which [`check_training`] has looked at.
    fn resume(&mut self, checkpoint: &Checkpoint, wanted: &Wanted) -> Result<(), EngineError> {
        let manifest = checkpoint.manifest();
        let training = &manifest.training;
        self.applied_steps = training.applied_steps;
        if let Some(state) = training.loss_scaler {
            self.scaler.resume(state)?;
        }
        for (index, weights) in wanted.weights.iter().enumerate() {
            let Some((param, tensor)) = *weights else { continue };
            let own = self.own_part(ParamId(index));
            let stored = manifest.tensors[tensor].part_shape.clone();
            let updates = &manifest.params[param].updates;
            // Parts that are other ones: what counts is where this one begins.
            let part = Part { shape: stored, ..own }.number().unwrap_or(0);
            self.params[index].updates = updates.get(part).copied().unwrap_or(updates[0]);
        }
        if wanted.groups {
            for (group, stored) in training.groups.iter().enumerate() {
                self.set_group(OptimGroup(group), group_options(stored))?;
            }
        }
        Ok(())
    }
}

/// A checkpoint's name has at most 255.
const NAME_BYTES: usize = 256;

impl Wanted {
    /// The tensors that are read, with their parameters.
    fn tensors(&self) -> impl Iterator<Item = (ParamId, usize)> {
        let weights = self.weights.iter().map(|found| found.map(|(_, tensor)| tensor));
        let all = weights.zip(&self.states).zip((0..).map(ParamId));
        all.flat_map(|((weights, states), param)| {
            let tensors = std::iter::once(weights).chain(states.iter().copied()).flatten();
            tensors.map(move |tensor| (param, tensor))
        })
    }
}

fn group_options(stored: &oxizero_checkpoint::Group) -> GroupOptions {
    GroupOptions { lr: stored.lr, weight_decay: stored.weight_decay }
}

/// Refuses numbers that cannot be trained with.
fn check_training(training: &Training) -> Result<(), EngineError> {
    if let Some(state) = training.loss_scaler {
        LossScale::new(state.scale)?;
    }
    training.groups.iter().try_for_each(|group| check_group(&group_options(group)))?;
    Ok(())
}

/// Refuses a tensor of another shape than this rank holds a part of, or of elements that are no
/// weights.
fn check_fits(tensor: &Tensor, own: &Part) -> Result<(), EngineError> {
    let refuse =
        |problem| Err(CheckpointError::Asked { tensor: tensor.to_string(), problem }.into());
    if !matches!(tensor.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
        return refuse(format!("its elements are {}, not F32, BF16 or F16", tensor.dtype));
    }
    match tensor.shape == own.whole {
        true => Ok(()),
        false => {
            let (there, here) = (&tensor.shape, &own.whole);
            refuse(format!("it has the shape {there:?} in the checkpoint, and {here:?} here"))
        }
    }
}

/// The dtype of a tensor that [`check_fits`].
fn loaded_dtype(tensor: &Tensor) -> DType {
    match tensor.dtype {
        Dtype::BF16 => DType::Bf16,
        Dtype::F16 => DType::F16,
        _ => DType::F32,
    }
}
