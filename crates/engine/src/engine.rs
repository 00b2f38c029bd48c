//! The engine: a front-end's events in, collectives and updates out.

use oxizero_comm::{CommError, Communicator, Traffic};
use oxizero_core::{
    Action, BucketId, Bytes, ConfigError, Event, GradientPath, LossScale, LossScaler, MemoryPlan,
    Mesh, ParamId, ParamSpec, PlanInput, Rank, RoleBytes, Schedule, UnitId, WorldSize,
    gradient_paths,
};
use oxizero_device::{Storage, View};

use crate::boundary::Boundary;
use crate::bucket::Bucket;
use crate::checkpoint::InFlight;
use crate::flight::UnderWay;
use crate::gradient::Contribution;
use crate::groups::Groups;
use crate::hyper::HyperParams;
use crate::ledger::Ledger;
use crate::model_grads::param_named;
use crate::observer::Span;
use crate::options::EngineOptions;
use crate::weights::{ParamWeights, UnitWeights};
use crate::window::{MicroBatch, Window, WindowState};
use crate::written::Written;
use crate::{EngineError, setup};

/// Trains a model's parameters over the ranks of a communicator.
///
/// Every rank makes one with the same parameters and options, and calls the same methods in the
/// same order. A micro-batch is: for each unit in order [`pre_forward`](Self::pre_forward) and
/// [`post_forward`](Self::post_forward), for each unit in reverse
/// [`pre_backward`](Self::pre_backward), [`grad_ready`](Self::grad_ready) for its parameters, and
/// [`post_backward`](Self::post_backward); then [`backward_end`](Self::backward_end) and
/// [`step`](Self::step). The [`chain`](crate::chain) driver makes these calls for a chain of
/// segments.
pub struct Engine {
    pub(crate) groups: Groups,
    pub(crate) storage: Storage,
    pub(crate) options: EngineOptions,
    pub(crate) hyper: HyperParams,
    pub(crate) specs: Vec<ParamSpec>,
    pub(crate) order: Vec<UnitId>,
    pub(crate) units: Vec<Vec<ParamId>>,
    pub(crate) buckets: Vec<Bucket>,
    pub(crate) params: Vec<ParamState>,
    /// By bucket: gradients of this micro-batch that have not come yet.
    pub(crate) missing: Vec<usize>,
    pub(crate) under_way: UnderWay,
    /// By bucket: the front-end says when its gradients are complete.
    pub(crate) awaits_end: Vec<bool>,
    pub(crate) schedule: Schedule,
    pub(crate) window: Window,
    pub(crate) boundary: Boundary,
    /// What was asked for in a pass, and holds from the next one on.
    pub(crate) next_sync: Option<bool>,
    pub(crate) scaler: LossScaler,
    pub(crate) applied_steps: u64,
    pub(crate) ledger: Ledger,
    pub(crate) written: Written,
    /// The first failure of a collective: nothing works after it.
    pub(crate) failed: Option<CommError>,
    /// A checkpoint turned out to be damaged while it was loaded.
    pub(crate) half_loaded: bool,
    /// A checkpoint that is being written.
    pub(crate) in_flight: Option<InFlight>,
    /// The traffic before the window began.
    pub(crate) step_start: Traffic,
    pub(crate) step_traffic: Traffic,
}

/// A gradient as a framework computed it.
#[derive(Clone, Copy, Debug)]
pub struct GradIn<'a> {
    /// The elements of the whole parameter, row-major.
    pub values: View<'a>,
    /// What the loss was multiplied by.
    pub loss_scale: LossScale,
}

/// What the engine knows of one parameter while it trains.
#[derive(Clone, Debug)]
pub(crate) struct ParamState {
    pub(crate) bucket: BucketId,
    pub(crate) slot: usize,
    /// Contributions in this micro-batch.
    pub(crate) arrived: usize,
    /// Its gradients on this rank in this window.
    pub(crate) seen: Seen,
    /// Updates applied so far.
    pub(crate) updates: u64,
}

/// The worst of the gradients that a parameter had in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Seen {
    /// There were none.
    Nothing,
    Finite,
    /// One was infinite or NaN.
    NonFinite,
}

impl Engine {
    /// The parameters, as they were given.
    pub fn params(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// The parameter with this name, one of several if it is tied, or an error that names it.
    pub fn param(&self, name: &str) -> Result<ParamId, EngineError> {
        let has = |spec: &ParamSpec| spec.names().any(|known| known == name);
        param_named(name, self.specs.iter().position(has))
    }

    /// The communicator of all ranks, for numbers of the caller's own such as the mean loss.
    pub fn communicator(&self) -> &dyn Communicator {
        self.groups.world()
    }

    /// Where the engine's memory lies, and gradients are taken from.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// How the ranks are arranged.
    pub fn mesh(&self) -> &Mesh {
        self.groups.mesh()
    }

    /// How many ranks work on micro-batches of their own; in a mesh, those along other axes work on
    /// the same as one of them.
    pub fn batch_ranks(&self) -> WorldSize {
        let mesh = self.mesh();
        mesh.size_over(mesh.without(mesh.same_batches()))
    }

    /// Which of the [`batch_ranks`](Self::batch_ranks) this rank is.
    pub fn batch_rank(&self) -> Rank {
        let mesh = self.mesh();
        mesh.place(mesh.without(mesh.same_batches()), self.groups.world().rank())
    }

    /// The options, as they were given.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Steps that were applied so far.
    pub fn applied_steps(&self) -> u64 {
        self.applied_steps
    }

    /// The learning rate of optimizer group `group` in the next step.
    pub fn lr(&self, group: usize) -> Option<f64> {
        self.hyper.lr(group, self.applied_steps)
    }

    /// What to multiply the losses of this window by before backward, and to say of its gradients.
    pub fn loss_scale(&self) -> LossScale {
        self.window.loss_scale.unwrap_or_else(|| self.scaler.scale())
    }

    /// Says whether gradients are reduced as they come (`true`, the rule), or add on this rank
    /// until they are again, or until the window is complete: DDP's `no_sync`. Where gradients
    /// rest sharded, what is kept back takes a whole bucket in the accumulation dtype each. Within
    /// a backward pass it holds from the next one on. All ranks keep back the same passes.
    pub fn set_grad_sync(&mut self, sync: bool) -> Result<(), EngineError> {
        self.next_sync = Some(sync);
        let gives = |param: &ParamState| param.arrived > 0;
        match self.schedule.in_pass() || self.params.iter().any(gives) {
            true => self.check_alive(),
            false => self.apply_sync(),
        }
    }

    /// Does between passes what [`set_grad_sync`](Self::set_grad_sync) asked for.
    pub(crate) fn apply_sync(&mut self) -> Result<(), EngineError> {
        self.next_sync.take().map_or(Ok(()), |sync| self.run(Event::GradSync(sync)))
    }

    /// States the weight of this rank's micro-batch, such as its number of tokens, for
    /// [`Reduction::Weighted`](crate::Reduction::Weighted); several add up. The loss is then a sum
    /// of so much weight, not a mean.
    pub fn weigh(&mut self, weight: f64) -> Result<(), EngineError> {
        if !(weight >= 0.0 && weight.is_finite()) {
            let allowed = "a finite number, 0 or above".into();
            let (field, value) = ("weight".into(), weight.to_string());
            return Err(EngineError::Config(ConfigError::Value { field, value, allowed }));
        }
        self.open_window()?;
        self.window.weight += weight;
        Ok(())
    }

    /// The unit is about to run forward: its weights are gathered, and the next unit's are asked
    /// for.
    pub fn pre_forward(&mut self, unit: UnitId) -> Result<(), EngineError> {
        self.unit_params(unit)?;
        self.groups.observed().begin(Span::Forward(unit));
        self.run(Event::PreForward(unit))
    }

    /// The unit ran forward; nothing but its outputs is needed of it.
    pub fn post_forward(&mut self, unit: UnitId) -> Result<(), EngineError> {
        self.unit_params(unit)?;
        self.run(Event::PostForward(unit))?;
        self.groups.observed().end(Span::Forward(unit));
        Ok(())
    }

    /// The unit is about to run backward.
    pub fn pre_backward(&mut self, unit: UnitId) -> Result<(), EngineError> {
        self.unit_params(unit)?;
        self.open_window()?;
        self.begin_pass();
        self.groups.observed().begin(Span::Backward(unit));
        self.run(Event::PreBackward(unit))
    }

    /// The unit ran backward.
    pub fn post_backward(&mut self, unit: UnitId) -> Result<(), EngineError> {
        self.unit_params(unit)?;
        self.open_window()?;
        self.run(Event::PostBackward(unit))?;
        self.groups.observed().end(Span::Backward(unit));
        Ok(())
    }

    /// The unit's full model weights, between `pre_forward` and `post_forward`, or between
    /// `pre_backward` and `post_backward`; where they rest replicated, at any time.
    pub fn unit_weights(&mut self, unit: UnitId) -> Result<UnitWeights, EngineError> {
        self.check_alive()?;
        self.unit_params(unit)?;
        let mut weights = Vec::with_capacity(self.units[unit.0].len());
        for index in 0..self.units[unit.0].len() {
            let param = self.units[unit.0][index];
            let id = self.params[param.0].bucket;
            if self.buckets[id.0].is_under_way() {
                self.wait_for(id, Bucket::settle)?;
            }
            let gathered = self.on_bucket(id, |bucket, _| bucket.gathered())?;
            let (state, spec) = (&self.params[param.0], &self.specs[param.0]);
            weights.push(ParamWeights {
                param,
                bucket: gathered.ok_or(EngineError::NotGathered { unit: unit.0 })?,
                elements: self.buckets[id.0].spec().layout.slot(state.slot),
                shape: spec.shape.clone(),
                trainable: spec.trainable,
            });
        }
        Ok(UnitWeights { unit, params: weights })
    }

    /// The unit's parameters, in the order in which they were declared.
    pub fn unit_params(&self, unit: UnitId) -> Result<&[ParamId], EngineError> {
        let (index, count) = (unit.0, self.units.len());
        let params = self.units.get(index).map(Vec::as_slice);
        params.ok_or(EngineError::Unknown { what: "unit", index, count })
    }

    /// Takes one gradient of a parameter; the engine copies what it needs.
    ///
    /// Where gradients rest sharded, a bucket is reduced after the [`post_backward`] of the last
    /// use of its units, and before that all of its gradients must have come. An engine without an
    /// order of units reduces it as soon as its gradients are complete: all ranks promise to run
    /// the same operations in backward, or a model that itself communicates there gives an order.
    ///
    /// [`post_backward`]: Self::post_backward
    pub fn grad_ready(&mut self, param: ParamId, grad: GradIn<'_>) -> Result<(), EngineError> {
        self.check_grad(param, grad)?;
        self.open_window()?;
        self.begin_pass();
        self.window.loss_scale = Some(grad.loss_scale);
        let ParamState { bucket: id, slot, .. } = self.params[param.0];
        let alone = self.schedule.reduces() && self.window.passes == 0;
        let contribution = Contribution { slot, values: grad.values, alone };
        let finite = self.on_bucket(id, |bucket, comm| bucket.contribute(contribution, comm))?;
        let state = &mut self.params[param.0];
        state.arrived += 1;
        state.seen = state.seen.max(if finite { Seen::Finite } else { Seen::NonFinite });
        self.missing[id.0] -= 1;
        let complete = self.missing[id.0] == 0 && !self.awaits_end[id.0];
        if complete { self.run(Event::GradsReady(id)) } else { Ok(()) }
    }

    /// A backward pass has no more gradients: parameters that gave none contribute zeros. A
    /// micro-batch may have several passes; [`step`](Self::step) ends it.
    pub fn backward_end(&mut self) -> Result<(), EngineError> {
        self.open_window()?;
        let reduces = self.schedule.reduces();
        self.run(Event::BackwardEnd)?;
        self.window.passes = if reduces { 0 } else { self.window.passes + 1 };
        self.window.backwards += 1;
        self.params.iter_mut().for_each(|param| param.arrived = 0);
        self.missing = setup::expected(&self.specs, &self.buckets);
        self.window.micro_batch = MicroBatch::BackwardEnded;
        self.end_pass();
        self.apply_sync()
    }

    /// What this rank holds now, by role.
    pub fn memory(&self) -> RoleBytes {
        self.buckets.iter().map(Bucket::bytes).fold(RoleBytes::default(), std::ops::Add::add)
    }

    /// The most that this rank held of each role.
    pub fn peak_memory(&self) -> RoleBytes {
        self.ledger.peak()
    }

    /// What this rank held of each role at the moment at which it held the most of all together.
    pub fn fullest_memory(&self) -> RoleBytes {
        self.ledger.fullest()
    }

    /// The most that this rank held of all roles at one moment.
    pub fn peak_memory_total(&self) -> Bytes {
        self.ledger.fullest().total()
    }

    /// What a rank of this engine is planned to hold.
    pub fn plan(&self) -> MemoryPlan {
        self.planned(MemoryPlan::new)
    }

    /// The dtype of gradients at each place on their way, by process group and dtype; whatever is
    /// not as asked says why.
    pub fn gradient_paths(&self) -> Vec<GradientPath> {
        self.planned(|input| gradient_paths(input, self.mesh()))
    }

    fn planned<T>(&self, plan: impl FnOnce(&PlanInput<'_>) -> T) -> T {
        let buckets: Vec<_> = self.buckets.iter().map(|bucket| bucket.spec().clone()).collect();
        plan(&PlanInput {
            stage: self.options.stage,
            precision: self.options.precision,
            accumulation: self.options.accumulation,
            state_count: self.hyper.setup.rule.state_names().len(),
            shares_replicas: self.groups.world().shares_replicas(),
            scratch: self.groups.world().scratch(),
            overlap: self.groups.overlap(),
            buckets: &buckets,
            order: &self.order,
        })
    }

    /// The collectives of the last window, from one applied or skipped step to the next, but for
    /// those of [`Chain::evaluate`](crate::chain::Chain::evaluate).
    pub fn step_traffic(&self) -> Traffic {
        self.step_traffic
    }

    /// The collectives of this rank so far, over all of its groups.
    pub fn traffic(&self) -> Traffic {
        self.groups.traffic()
    }

    /// Does something whose collectives are no part of a step.
    pub(crate) fn beside_the_step<T>(&mut self, deed: impl FnOnce(&mut Self) -> T) -> T {
        let before = self.groups.traffic();
        let result = deed(self);
        self.step_start = self.step_start + (self.groups.traffic() - before);
        result
    }

    pub(crate) fn run(&mut self, event: Event) -> Result<(), EngineError> {
        self.check_alive()?;
        let mut actions = Vec::new();
        self.schedule.on(event, &mut actions);
        // The window's end comes after its last pass, everything else within one.
        let passes = self.window.passes + usize::from(event != Event::Boundary);
        for action in actions {
            self.perform(action, passes)?;
        }
        Ok(())
    }

    /// Does it, with gradients that are sums over `passes`.
    fn perform(&mut self, action: Action, passes: usize) -> Result<(), EngineError> {
        match action {
            Action::Unshard(id) => {
                let seen = self.groups.observed().of(Span::Gather(id));
                self.on_bucket(id, |bucket, comm| bucket.unshard(comm, seen))
            }
            Action::Reshard(id) => self.on_bucket(id, |bucket, _| bucket.reshard()),
            Action::Reduce(id, to) => self.reduce(id, (to, passes)),
            Action::Publish(_) | Action::Update(_) => unreachable!("update() does these"),
        }
    }

    /// Does something to one bucket, and keeps account of it.
    pub(crate) fn on_bucket<T>(
        &mut self,
        id: BucketId,
        deed: impl FnOnce(&mut Bucket, &dyn Communicator) -> Result<T, CommError>,
    ) -> Result<T, EngineError> {
        let bucket = &mut self.buckets[id.0];
        let before = bucket.bytes();
        let comm = self.groups.over(bucket.spec().sharing.reduced);
        let result = deed(bucket, comm);
        self.ledger.change(before, bucket.bytes());
        result.map_err(|error| self.fail(error))
    }

    /// Remembers that a collective failed: buffers that were in flight are lost.
    pub(crate) fn fail(&mut self, error: CommError) -> EngineError {
        EngineError::Comm(self.failed.get_or_insert(error).clone())
    }

    /// The same for an error that may be another.
    pub(crate) fn settled(&mut self, error: EngineError) -> EngineError {
        match error {
            EngineError::Comm(error) => self.fail(error),
            other => other,
        }
    }

    /// Refuses to go on after a collective failed, or with some of a checkpoint's weights.
    pub(crate) fn check_alive(&self) -> Result<(), EngineError> {
        if self.half_loaded {
            return Err(EngineError::HalfLoaded);
        }
        self.failed.clone().map_or(Ok(()), |error| Err(EngineError::Comm(error)))
    }

    fn check_grad(&self, param: ParamId, grad: GradIn<'_>) -> Result<(), EngineError> {
        self.check_alive()?;
        let (index, count) = (param.0, self.specs.len());
        let spec = self.specs.get(index);
        let spec = spec.ok_or(EngineError::Unknown { what: "parameter", index, count })?;
        let name = || spec.name.clone();
        let refuse = |why: String| Err(EngineError::UnexpectedGrad { param: name(), why });
        if grad.values.numel() != spec.numel() {
            let (expected, got) = (spec.numel(), grad.values.numel());
            return Err(EngineError::WrongNumel { what: "gradient", param: name(), expected, got });
        }
        if !spec.trainable {
            return refuse("it is frozen".into());
        }
        if matches!(self.window.state, WindowState::Reduced(_)) {
            return refuse("the window's gradients are reduced; call step() first".into());
        }
        if self.schedule.has_reduced(self.params[index].bucket) {
            return refuse(
                "its bucket was reduced after the backward of its unit; give gradients between \
                 pre_backward and post_backward, and name every use of a unit in the order"
                    .into(),
            );
        }
        if self.params[index].arrived == spec.contributions {
            return refuse(format!(
                "it was declared to contribute {} times a micro-batch, and has; declare it with a \
                 larger ParamSpec::contributions",
                spec.contributions
            ));
        }
        match self.window.loss_scale {
            Some(scale) if scale != grad.loss_scale => refuse(format!(
                "it has loss scale {}, the window's other gradients {}; change the scale between \
                 windows",
                grad.loss_scale.get(),
                scale.get()
            )),
            _ => Ok(()),
        }
    }

    /// Starts a window if there is none.
    pub(crate) fn open_window(&mut self) -> Result<(), EngineError> {
        match self.window.state {
            WindowState::Empty | WindowState::Consumed => {
                self.window.state = WindowState::Accumulating(0);
                Ok(())
            }
            WindowState::Accumulating(_) => Ok(()),
            WindowState::Reduced(_) => Err(EngineError::AlreadyReduced),
        }
    }
}
