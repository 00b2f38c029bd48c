//! One bucket: its model weights, master weights, optimizer states and gradient, each at rest where
//! the stage says.

mod elsewhere;
mod fields;
mod kept;

use std::ops::Range;
use std::sync::Arc;

use oxizero_comm::{CommError, Communicator, Handle, issue};
use oxizero_core::{
    BucketSpec, Bytes, DType, Layout, Numel, ParamId, Piece, Placement, Precision, RoleBytes,
    Stage, model_is_master,
};
use oxizero_device::{Buffer, Storage, View, kernels};
use oxizero_optim::{Gradient as OptimGradient, Optimizer, Weights};

use crate::gradient::{Contribution, Gradient, alloc};
use crate::hyper::ParamUpdate;
use crate::observer::Observation;
use crate::step::Unscaled;

use self::elsewhere::Arriving;

pub(crate) use fields::{Field, overlap};
pub(crate) use kept::Kept;

/// The parameters that are communicated together, on this rank.
#[derive(Debug)]
pub(crate) struct Bucket {
    spec: BucketSpec,
    shard: Range<usize>,
    /// The elements whose model weights this rank writes.
    writes: Range<usize>,
    model: Model,
    /// Model weights that rest replicated, while all ranks put theirs together.
    published: Option<Handle<Buffer>>,
    arriving: Option<Arriving>,
    trained: Option<Trained>,
    storage: Storage,
}

#[derive(Debug)]
enum Model {
    /// All elements; `None` only while they are published.
    Replicated(Option<Arc<Buffer>>),
    /// This rank's shard (`None` while it is being gathered), and the gathered elements.
    Sharded { shard: Option<Buffer>, full: Full },
}

#[derive(Debug)]
enum Full {
    Released,
    Gathering(Handle<(Buffer, Buffer)>),
    Gathered(Arc<Buffer>),
    /// In memory of the front-end's own.
    Elsewhere,
}

#[derive(Debug)]
struct Trained {
    /// The elements that this rank's optimizer updates.
    owned: Range<usize>,
    /// f32 weights of the owned elements; `None` where the model weights are these themselves.
    master: Option<Buffer>,
    states: Vec<Buffer>,
    grad: Gradient,
}

/// What all buckets are made with.
pub(crate) struct Setting<'a> {
    pub(crate) stage: Stage,
    pub(crate) precision: Precision,
    pub(crate) rule: &'a dyn Optimizer,
    pub(crate) comm: &'a dyn Communicator,
    pub(crate) storage: &'a Storage,
}

impl Bucket {
    /// Keeps what the stage keeps of `initial`, the f32 weights of all elements.
    pub(crate) fn new(
        spec: BucketSpec,
        initial: &Buffer,
        setting: &Setting<'_>,
    ) -> Result<Self, CommError> {
        let Setting { stage, comm, storage, .. } = *setting;
        let layout = &spec.layout;
        let shard = layout.shard(comm.rank());
        let alone = stage.optim() == Placement::Replicated && !comm.shares_replicas();
        let writes = if alone { layout.all() } else { shard.clone() };
        let model = match stage.model() {
            Placement::Sharded => {
                let mut weights = alloc(comm, layout.shard_numel(), spec.dtype)?;
                kernels::cast(initial.range(shard.clone()), weights.view_mut());
                Model::Sharded { shard: Some(weights), full: Full::Released }
            }
            _ => {
                let bytes = layout.padded_numel().bytes(spec.dtype);
                let mut weights = Buffer::new(comm.alloc_replica(bytes)?, spec.dtype);
                kernels::cast(initial.range(writes.clone()), weights.range_mut(writes.clone()));
                Model::Replicated(Some(Arc::new(weights)))
            }
        };
        let trained =
            if spec.trainable { Some(Trained::new(&spec, initial, setting)?) } else { None };
        let storage = storage.clone();
        let (published, arriving) = (None, None);
        let mut bucket = Self { spec, shard, writes, model, published, arriving, trained, storage };
        bucket.publish(comm, Observation::default())?;
        bucket.settle()?;
        Ok(bucket)
    }

    /// The parameters and their element ranges.
    pub(crate) fn spec(&self) -> &BucketSpec {
        &self.spec
    }

    /// The elements that are this rank's where the bucket is sharded.
    pub(crate) fn shard(&self) -> Range<usize> {
        self.shard.clone()
    }

    /// Starts to gather the full model weights.
    pub(crate) fn unshard(
        &mut self,
        comm: &dyn Communicator,
        seen: Observation,
    ) -> Result<(), CommError> {
        let Model::Sharded { shard, full } = &mut self.model else { return Ok(()) };
        let shard = shard.take().expect("a bucket is unsharded once before it is resharded");
        let gathered = self.storage.buffer(self.spec.layout.padded_numel(), self.spec.dtype);
        *full = Full::Gathering(gather(comm, (shard, gathered), seen));
        Ok(())
    }

    /// Lets go of the full model weights. Whoever still views them keeps them alive.
    pub(crate) fn reshard(&mut self) -> Result<(), CommError> {
        self.gathered()?;
        if let Model::Sharded { full, .. } = &mut self.model {
            *full = Full::Released;
        }
        Ok(())
    }

    /// The full model weights, if they are gathered or rest replicated.
    pub(crate) fn gathered(&mut self) -> Result<Option<Arc<Buffer>>, CommError> {
        match &mut self.model {
            Model::Replicated(weights) => Ok(weights.clone()),
            Model::Sharded { shard, full } => {
                *full = match std::mem::replace(full, Full::Released) {
                    Full::Gathering(handle) => {
                        let (rest, gathered) = handle.wait()?;
                        *shard = Some(rest);
                        Full::Gathered(Arc::new(gathered))
                    }
                    other => other,
                };
                Ok(match full {
                    Full::Gathered(weights) => Some(weights.clone()),
                    _ => None,
                })
            }
        }
    }

    /// Whether the front-end holds no view of weights that a step writes.
    pub(crate) fn is_exclusive(&mut self) -> bool {
        match &mut self.model {
            Model::Replicated(Some(weights)) => Arc::get_mut(weights).is_some(),
            Model::Sharded { full, .. } => !matches!(full, Full::Elsewhere),
            _ => true,
        }
    }

    /// Adds one contribution to a gradient. Returns whether what is stored of it is finite.
    pub(crate) fn contribute(
        &mut self,
        contribution: Contribution<'_>,
        comm: &dyn Communicator,
    ) -> Result<bool, CommError> {
        match &mut self.trained {
            Some(trained) => trained.grad.contribute(contribution, &self.spec.layout, comm),
            None => Ok(true),
        }
    }

    /// Starts to take this rank's partial gradients, a sum over `passes`, to placement `to`.
    pub(crate) fn reduce(
        &mut self,
        (to, passes): (Placement, usize),
        comm: &dyn Communicator,
        seen: Observation,
    ) -> Result<(), CommError> {
        match &mut self.trained {
            Some(trained) => trained.grad.reduce((to, passes), &self.spec.layout, comm, seen),
            None => Ok(()),
        }
    }

    /// Waits for the reduction that was started, if one was.
    pub(crate) fn land(&mut self) -> Result<(), CommError> {
        self.trained.as_mut().map_or(Ok(()), |trained| trained.grad.land())
    }

    /// The reduced gradient in this rank's shard, piece by piece, with the parameters; none of a
    /// frozen bucket.
    pub(crate) fn reduced(&self) -> impl Iterator<Item = (ParamId, View<'_>)> {
        self.trained.iter().flat_map(|trained| {
            let piece = |piece: Piece| {
                let param = self.spec.params[piece.slot];
                (param, trained.grad.view(piece.in_bucket, &self.shard))
            };
            self.spec.layout.pieces(self.shard.clone()).map(piece)
        })
    }

    /// The dtype of the accumulator; `None` for a frozen bucket.
    pub(crate) fn grad_dtype(&self) -> Option<DType> {
        self.trained.as_ref().map(|trained| trained.grad.dtype())
    }

    /// Forgets the gradient.
    pub(crate) fn clear_grad(&mut self) {
        if let Some(trained) = &mut self.trained {
            trained.grad.clear();
        }
    }

    /// Updates the owned master weights and the model weights that this rank writes, each parameter
    /// as `update_of` it says: not at all for one that no rank used. What a borrower of the model
    /// weights wrote to them, said or not, is the master weights before the update.
    ///
    /// Neighbours that are updated alike, with no padding between them, are updated at once: rules
    /// work element by element, and a call may cost more than the elements of a small parameter.
    ///
    /// # Panics
    ///
    /// If views of the weights are left; the step has checked that there are none.
    pub(crate) fn update<'a>(
        &mut self,
        unscaled: &Unscaled,
        update_of: impl Fn(ParamId) -> Option<ParamUpdate<'a>>,
    ) {
        let Some(trained) = &mut self.trained else { return };
        let (model, model_start) = fields::writable(&mut self.model, self.shard.start);
        let (owned, writes) = (trained.owned.clone(), &self.writes);
        let parts = [
            (owned.start..writes.start, false),
            (writes.clone(), true),
            (writes.end..owned.end, false),
        ];
        let update_of = |piece: Piece| {
            update_of(self.spec.params[piece.slot]).map(|update| (update, piece.in_bucket))
        };
        for (part, write) in parts.into_iter().filter(|(part, _)| !part.is_empty()) {
            let mut pieces = self.spec.layout.pieces(part).filter_map(update_of).peekable();
            while let Some((update, mut run)) = pieces.next() {
                while let Some((_, next)) =
                    pieces.next_if(|(other, next)| next.start == run.end && other.is_like(&update))
                {
                    run.end = next.end;
                }
                let model = (&mut *model, offset(&run, model_start), write);
                trained.update(unscaled, update, (run, &self.shard), model);
            }
        }
    }

    /// Starts to make the model weights that each rank wrote known to all.
    pub(crate) fn publish(
        &mut self,
        comm: &dyn Communicator,
        seen: Observation,
    ) -> Result<(), CommError> {
        let Model::Replicated(weights) = &mut self.model else { return Ok(()) };
        if self.writes == self.spec.layout.all() {
            return Ok(());
        }
        let full = weights.take().and_then(|weights| Arc::try_unwrap(weights).ok());
        let full = full.expect("nobody views weights that are being written");
        let deed = move |comm: &dyn Communicator| seen.during(|| comm.all_gather(full)?.wait());
        self.published = Some(issue(comm, deed));
        Ok(())
    }

    /// Whether model weights are on their way.
    pub(crate) fn is_under_way(&self) -> bool {
        let is_gathering = matches!(&self.model, Model::Sharded { full: Full::Gathering(_), .. });
        is_gathering || self.published.is_some() || self.is_arriving()
    }

    /// Waits for model weights that are on their way, published or gathered, if any are.
    pub(crate) fn settle(&mut self) -> Result<(), CommError> {
        if let Some(published) = self.published.take() {
            self.model = Model::Replicated(Some(Arc::new(published.wait()?)));
        }
        self.settle_arriving()?;
        self.gathered().map(drop)
    }

    /// Bytes that this rank holds now, by role. A replica counts in full.
    pub(crate) fn bytes(&self) -> RoleBytes {
        let len = |buffer: &Option<Buffer>| buffer.as_ref().map_or(Bytes(0), Buffer::len);
        let all = self.spec.layout.padded_numel().bytes(self.spec.dtype);
        let (model, gathered) = match &self.model {
            Model::Replicated(_) => (all, Bytes(0)),
            Model::Sharded { full, .. } => {
                let rest = self.spec.layout.shard_numel().bytes(self.spec.dtype);
                (rest, if matches!(full, Full::Released) { Bytes(0) } else { all })
            }
        };
        let Some(trained) = &self.trained else {
            return RoleBytes { model, gathered, ..RoleBytes::default() };
        };
        let (gradients, partial) = trained.grad.bytes();
        RoleBytes {
            model,
            gradients,
            masters: len(&trained.master),
            optimizer: trained.states.iter().map(Buffer::len).sum(),
            gathered,
            partial,
            initial: Bytes(0),
        }
    }
}

impl Trained {
    fn new(spec: &BucketSpec, initial: &Buffer, setting: &Setting<'_>) -> Result<Self, CommError> {
        let Setting { stage, precision, rule, comm, storage } = *setting;
        let layout = &spec.layout;
        let owned = owned(stage, layout, comm);
        let numel = Numel(owned.len());
        let master = if !model_is_master(stage, spec.dtype, comm.shares_replicas()) {
            let mut master = storage.resting(numel, DType::F32);
            kernels::cast(initial.range(owned.clone()), master.view_mut());
            Some(master)
        } else {
            None
        };
        let states = rule.state_names().iter().map(|_| state(rule, numel, storage)).collect();
        let grad = Gradient::new(stage, spec, precision.for_param(spec.dtype), comm)?;
        Ok(Self { owned, master, states, grad })
    }
}

impl Trained {
    /// Updates the elements `run` of the bucket, which are `in_model` of the model weights, and
    /// written there if `write` says so.
    fn update(
        &mut self,
        unscaled: &Unscaled,
        update: ParamUpdate<'_>,
        (run, shard): (Range<usize>, &Range<usize>),
        (model, in_model, write): (&mut Buffer, Range<usize>, bool),
    ) {
        let in_owned = offset(&run, self.owned.start);
        let is_lent = model.region().is_lent();
        let (master, model) = match &mut self.master {
            Some(master) => {
                let model = write.then(|| model.range_mut(in_model));
                let mut master = master.range_mut(in_owned.clone());
                if let (true, Some(model)) = (is_lent, &model) {
                    kernels::adopt(model.as_view(), master.reborrow());
                }
                (master, model)
            }
            None => (model.range_mut(in_model), None),
        };
        let values = self.grad.view(run, shard);
        let (divisor, factor) = (unscaled.divisor(), unscaled.factor());
        let grad = OptimGradient { values, divisor, factor };
        // Nothing is allocated for each of many parameters: rules keep two states at most.
        match &mut self.states[..] {
            [] => apply(update, grad, Weights { master, states: &mut [], model }),
            [one] => {
                let states = &mut [one.range_mut(in_owned)];
                apply(update, grad, Weights { master, states, model });
            }
            [one, two] => {
                let states = &mut [one.range_mut(in_owned.clone()), two.range_mut(in_owned)];
                apply(update, grad, Weights { master, states, model });
            }
            more => {
                let states = more.iter_mut().map(|state| state.range_mut(in_owned.clone()));
                let mut states: Vec<_> = states.collect();
                apply(update, grad, Weights { master, states: &mut states, model });
            }
        }
    }
}

fn apply(update: ParamUpdate<'_>, grad: OptimGradient<'_>, weights: Weights<'_>) {
    update.rule.update(update.hyper, update.step, grad, weights);
}

/// Starts to gather all ranks' shards; the first of `buffers` is this rank's, the second is filled.
fn gather(
    comm: &dyn Communicator,
    (shard, full): (Buffer, Buffer),
    seen: Observation,
) -> Handle<(Buffer, Buffer)> {
    issue(comm, move |comm| seen.during(|| comm.all_gather_into(shard, full)?.wait()))
}

/// One of the rule's states, before the first update.
fn state(rule: &dyn Optimizer, numel: Numel, storage: &Storage) -> Buffer {
    let mut state = storage.resting(numel, DType::F32);
    let initial = rule.initial_state();
    if initial != 0.0 {
        kernels::fill(state.view_mut(), initial);
    }
    state
}

fn owned(stage: Stage, layout: &Layout, comm: &dyn Communicator) -> Range<usize> {
    match stage.optim() {
        Placement::Sharded => layout.shard(comm.rank()),
        _ => layout.all(),
    }
}

fn offset(range: &Range<usize>, start: usize) -> Range<usize> {
    range.start - start..range.end - start
}
