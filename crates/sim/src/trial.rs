//! One training, run by the engine in a simulated world and by the oracle.

mod arrangement;
mod expected;

use oxizero::{
    Backend, Boundary, Engine, EngineError, EngineOptions, GradIn, GradNorms, GroupOptions,
    ModelGrads, OptimizerSetup, Reduction, Scope, StepOutcome,
};
use oxizero_comm::Communicator;
use oxizero_core::{DType, Numel, ParamId, ParamSpec, UnitId};
use oxizero_device::{Buffer, Storage, View, ViewMut, kernels};
use oxizero_optim::{
    Adagrad, AdagradOptions, Adam, AdamW, Lion, LionOptions, LrSchedule, MomentOptions, Momentum,
    OptimError, Optimizer, Sgd,
};

use crate::opaque::{OnOpaque, Opaque};
use crate::oracle::{MicroBatch, Pass, Rule};
use crate::{opaque, world};

/// A training: a model, its gradients, and what is asked for.
#[derive(Clone)]
pub struct Trial {
    /// The parameters, units ascending from 0.
    pub specs: Vec<ParamSpec>,
    /// Their initial weights. Where ranks hold different tensors of a parameter, they are those of
    /// one after the other, and begin again where they are too few.
    pub initial: Vec<Vec<f32>>,
    /// What the engine is asked for.
    pub options: EngineOptions,
    /// The update rule.
    pub rule: Rule,
    /// Learning rates and weight decays.
    pub groups: Vec<GroupOptions>,
    /// Ranks.
    pub ranks: usize,
    /// Windows.
    pub steps: usize,
    /// Steps in which the learning rate rises.
    pub warmup_steps: u64,
    /// What micro-batches and passes windows have.
    pub windows: Windows,
    /// Who ends them.
    pub ends: Ends,
    /// The gradients.
    pub backward: Backward,
    /// For trials that differ in what they draw.
    pub seed: u64,
    /// Whether gradients are read before a step.
    pub reads: Reads,
}

/// Whether gradients are read before a step. It changes who reduces a window, and no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// All of them, in every way.
    All,
    /// None: the step reduces them.
    None,
    /// All of them, and then they are set to what was read: to the data-parallel ones, to the
    /// global ones, and one by one, in turn.
    SetBack,
}

/// Who says when a window ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// The engine, which counts; the caller only where windows are shorter or longer.
    Counted,
    /// The caller.
    Called,
}

/// The contributions to a parameter before the loss scale, from where and its model weights; none
/// if it is not used.
pub type Backward = fn(At, &[f32]) -> Vec<Vec<f32>>;

/// The micro-batches of a rank's window, from the step and the rank; of ranks that work on the same
/// micro-batches the first is asked for.
pub type Windows = fn(&Trial, usize, usize) -> Vec<MicroBatch>;

/// Where a gradient arises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The window, from 0.
    pub step: usize,
    /// The micro-batch in the window, from 0.
    pub micro: usize,
    /// The pass in the micro-batch, from 0.
    pub pass: usize,
    /// The rank; the first of those that the mesh says have the same gradient.
    pub rank: usize,
    /// The parameter.
    pub param: usize,
    /// The trial's.
    pub seed: u64,
}

/// What a training leaves on one rank; every number as f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trained {
    /// By window: its outcome.
    pub outcomes: Vec<Outcome>,
    /// By window and parameter: the gradient before clipping; empty for a frozen parameter. No
    /// parameters where gradients are not read.
    pub grads: Vec<Vec<Vec<f32>>>,
    /// The same, read for the whole model at once.
    pub model_grads: Vec<Vec<Vec<f32>>>,
    /// The same, of whole tensors where ranks hold different ones.
    pub global_grads: Vec<Vec<Vec<f32>>>,
    /// Their norms by window and parameter, as read; none of a frozen parameter.
    pub grad_norms: Vec<GradNorms>,
    /// By window: the loss scale after it.
    pub loss_scales: Vec<f32>,
    /// By parameter: the model weights at the end.
    pub weights: Vec<Vec<f32>>,
    /// By parameter: the master weights at the end, then the optimizer's states; none of a frozen
    /// parameter.
    pub states: Vec<Vec<Vec<f32>>>,
}

/// What a rank's engine is made of.
pub struct Member {
    /// Its communicator.
    pub comm: Box<dyn Communicator>,
    /// Where its memory lies.
    pub storage: Storage,
    /// Its update rule.
    pub rule: Box<dyn Optimizer>,
    /// What it is told of the parameters.
    pub specs: Vec<ParamSpec>,
}

/// What was read of a window's gradients; of [`Trained`] one window. Empty if nothing was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Read {
    /// Of every parameter by itself.
    pub grads: Vec<Vec<f32>>,
    /// Of the whole model.
    pub model_grads: Vec<Vec<f32>>,
    /// Of the whole model, across the mesh.
    pub global_grads: Vec<Vec<f32>>,
    /// Norms.
    pub grad_norms: GradNorms,
}

/// Whether a window's step was applied, and the norm before clipping if it was.
pub type Outcome = Option<f64>;

impl Trial {
    /// SGD with a learning rate of 1 on one rank, one step of one window: what is left is to say
    /// what the gradients are.
    pub fn new(options: EngineOptions, params: &[(&str, &[f32])], backward: Backward) -> Self {
        let dtype = options.precision.model;
        let spec = |(unit, (name, weights)): (usize, &(&str, &[f32]))| {
            ParamSpec::new(*name, &[weights.len()], dtype, UnitId(unit))
        };
        Self {
            specs: params.iter().enumerate().map(spec).collect(),
            initial: params.iter().map(|(_, weights)| weights.to_vec()).collect(),
            options,
            rule: Rule::Sgd { momentum: 0.0 },
            groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
            ranks: 1,
            steps: 1,
            warmup_steps: 0,
            windows: full_windows,
            ends: Ends::Counted,
            backward,
            seed: 0,
            reads: Reads::All,
        }
    }

    /// Trains with the engine as the rank of `comm`, and hands the engine over too.
    pub fn engine(&self, comm: Box<dyn Communicator>) -> Result<(Trained, Engine), EngineError> {
        self.engine_of(self.member(comm)?)
    }

    /// What the engine of a rank is made of.
    pub fn member(&self, comm: Box<dyn Communicator>) -> Result<Member, OptimError> {
        let (storage, specs) = (Storage::Host, self.specs.clone());
        Ok(Member { comm, storage, rule: optimizer(self.rule)?, specs })
    }

    /// The same on a device that the host cannot look into.
    pub fn member_on(
        &self,
        device: &Opaque,
        comm: Box<dyn Communicator>,
    ) -> Result<Member, OptimError> {
        let Backend { storage, communicator, .. } = device.backend(comm);
        let member = self.member(communicator)?;
        Ok(Member { storage, rule: Box::new(OnOpaque(member.rule)), ..member })
    }

    /// Trains with an engine that is made of something else than [`member`](Self::member) says.
    pub fn engine_of(&self, member: Member) -> Result<(Trained, Engine), EngineError> {
        let mut engine = self.start_of(member)?;
        let mut trained = Trained::default();
        for step in 0..self.steps {
            let (outcome, read) = self.window(&mut engine, step)?;
            trained.outcomes.push(match outcome {
                StepOutcome::Applied { norm_before, .. } => Some(norm_before),
                _ => None,
            });
            trained.read(read);
            trained.loss_scales.push(engine.loss_scale().get());
        }
        trained.weights = self.weights(&mut engine)?;
        trained.states = self.states(&mut engine)?;
        Ok((trained, engine))
    }

    /// Trains with the engine in a simulated world; by rank.
    ///
    /// # Panics
    ///
    /// If a rank fails.
    pub fn run(&self) -> Vec<Trained> {
        world::run(self.ranks, |comm| self.trained(comm))
    }

    /// The same, with every rank's operations on a thread of their own.
    ///
    /// # Panics
    ///
    /// If a rank fails.
    pub fn run_overlapped(&self) -> Vec<Trained> {
        world::run_overlapped(self.ranks, |comm| self.trained(comm))
    }

    fn trained(&self, comm: Box<dyn Communicator>) -> Trained {
        match self.engine(comm) {
            Ok((trained, _)) => trained,
            Err(error) => panic!("{error}"),
        }
    }

    /// An engine that has not trained yet.
    pub fn start(&self, comm: Box<dyn Communicator>) -> Result<Engine, EngineError> {
        self.start_of(self.member(comm)?)
    }

    /// An engine that is made of something else, and has not trained yet.
    pub fn start_of(&self, member: Member) -> Result<Engine, EngineError> {
        let Member { comm, storage, rule, specs } = member;
        let optimizer = OptimizerSetup {
            rule,
            groups: self.groups.clone(),
            schedule: LrSchedule::constant(self.warmup_steps),
        };
        let rank = comm.rank().0;
        let mut initial = |param: ParamId, weights: ViewMut<'_>| {
            let values = self.initial_of(param.0, self.instance(param.0, rank));
            kernels::cast(View::F32(&values), weights);
        };
        let backend = Backend { storage, communicator: comm, observer: None };
        let options = self.options.clone();
        Engine::on_backend(specs, self.order(), options, optimizer, backend, &mut initial)
    }

    /// Runs one window as a front-end does, and returns the gradients that it read.
    pub fn window(
        &self,
        engine: &mut Engine,
        step: usize,
    ) -> Result<(StepOutcome, Read), EngineError> {
        let micro_batches = self.micro_batches(step, engine.communicator().rank().0).len();
        for micro in 0..micro_batches - 1 {
            engine.set_boundary(self.boundary(micro, micro_batches));
            self.micro_batch(engine, step, micro)?;
            let outcome = engine.step()?;
            assert!(matches!(outcome, StepOutcome::Accumulated { .. }), "{outcome:?}");
        }
        engine.set_boundary(self.boundary(micro_batches - 1, micro_batches));
        self.micro_batch(engine, step, micro_batches - 1)?;
        let read = match self.reads {
            Reads::None => Read::default(),
            Reads::All | Reads::SetBack => self.read(engine, step)?,
        };
        Ok((engine.step()?, read))
    }

    /// Reads the window's gradients in every way, and sets them to what was read if that is asked
    /// for.
    fn read(&self, engine: &mut Engine, step: usize) -> Result<Read, EngineError> {
        let mut read = Read::default();
        for param in (0..self.specs.len()).map(ParamId) {
            let grad = engine.full_grad(param)?;
            read.grads.push(grad.map(|grad| to_f32(grad.view())).unwrap_or_default());
        }
        read.grad_norms = engine.grad_norms()?;
        let model = engine.full_grads(Scope::DataParallel)?;
        read.model_grads = self.of_model(&model);
        let global = engine.full_grads(Scope::Global)?;
        read.global_grads = self.of_model(&global);
        match (self.reads, step % 3) {
            (Reads::SetBack, 0) => engine.set_full_grads(&model)?,
            (Reads::SetBack, 1) => engine.set_full_grads(&global)?,
            (Reads::SetBack, _) => engine.map_grads(|_, _, _| ())?,
            (Reads::All | Reads::None, _) => {}
        }
        Ok(read)
    }

    fn of_model(&self, grads: &ModelGrads) -> Vec<Vec<f32>> {
        let of = |param: usize| grads.get(ParamId(param)).map(to_f32).unwrap_or_default();
        (0..self.specs.len()).map(of).collect()
    }

    /// What is said of the micro-batch of so many.
    fn boundary(&self, micro: usize, micro_batches: usize) -> Boundary {
        let last = micro + 1 == micro_batches;
        let counted = last == (micro + 1 >= self.options.accumulation);
        match self.ends {
            Ends::Counted if counted => Boundary::Counted,
            _ if last => Boundary::Now,
            _ => Boundary::Later,
        }
    }

    /// Runs one micro-batch, up to its last `backward_end`.
    pub fn micro_batch(
        &self,
        engine: &mut Engine,
        step: usize,
        micro: usize,
    ) -> Result<(), EngineError> {
        let rank = engine.communicator().rank().0;
        let MicroBatch { passes, weight } = self.micro_batches(step, rank).swap_remove(micro);
        if self.options.reduction == Reduction::Weighted {
            // In two parts, on both sides of the passes.
            engine.weigh(0.75 * weight)?;
        }
        for (pass, kind) in passes.into_iter().enumerate() {
            engine.set_grad_sync(kind == Pass::Reduced)?;
            self.pass(engine, At { step, micro, pass, rank, param: 0, seed: self.seed })?;
        }
        if self.options.reduction == Reduction::Weighted {
            engine.weigh(0.25 * weight)?;
        }
        Ok(())
    }

    /// Runs one backward pass, of every parameter. Two of a micro-batch share a forward.
    pub fn pass(&self, engine: &mut Engine, at: At) -> Result<(), EngineError> {
        let forwards = if at.pass.is_multiple_of(2) { self.order() } else { Vec::new() };
        for unit in forwards {
            engine.pre_forward(unit)?;
            engine.post_forward(unit)?;
        }
        let loss_scale = engine.loss_scale();
        for unit in self.order().into_iter().rev() {
            engine.pre_backward(unit)?;
            for param in engine.unit_weights(unit)?.params.iter().filter(|param| param.trainable) {
                let rank = self.first_alike(param.param.0, at.rank);
                let at = At { param: param.param.0, rank, ..at };
                for mut grad in (self.backward)(at, &to_f32(param.view())) {
                    grad.iter_mut().for_each(|grad| *grad *= loss_scale.get());
                    let on_device = opaque::given(engine.storage(), &grad);
                    let values = on_device.as_ref().map_or(View::F32(&grad), Buffer::view);
                    engine.grad_ready(param.param, GradIn { values, loss_scale })?;
                }
            }
            engine.post_backward(unit)?;
        }
        engine.backward_end()
    }

    /// Every parameter's model weights, read unit by unit as forward reads them.
    pub fn weights(&self, engine: &mut Engine) -> Result<Vec<Vec<f32>>, EngineError> {
        let mut weights = vec![Vec::new(); self.specs.len()];
        for unit in self.order() {
            engine.pre_forward(unit)?;
            for param in engine.unit_weights(unit)?.params {
                weights[param.param.0] = to_f32(param.view());
            }
            engine.post_forward(unit)?;
        }
        Ok(weights)
    }

    /// Every parameter's master weights and optimizer states.
    pub fn states(&self, engine: &mut Engine) -> Result<Vec<Vec<Vec<f32>>>, EngineError> {
        let names = optimizer(self.rule)?.state_names();
        let mut states = vec![Vec::new(); self.specs.len()];
        for (param, states) in states.iter_mut().enumerate() {
            let param = ParamId(param);
            states.extend(engine.full_param(param)?.map(|master| to_f32(master.view())));
            for name in names {
                states.extend(engine.full_state(param, name)?.map(|state| to_f32(state.view())));
            }
        }
        Ok(states)
    }

    /// The order in which forward uses the units.
    pub fn order(&self) -> Vec<UnitId> {
        let mut units: Vec<_> = self.specs.iter().map(|spec| spec.unit).collect();
        units.sort_unstable();
        units.dedup();
        units
    }
}

impl Trained {
    fn read(&mut self, read: Read) {
        self.grads.push(read.grads);
        self.model_grads.push(read.model_grads);
        self.global_grads.push(read.global_grads);
        self.grad_norms.push(read.grad_norms);
    }
}

/// As many micro-batches as are asked for, each one pass of weight 1.
pub fn full_windows(trial: &Trial, _step: usize, _rank: usize) -> Vec<MicroBatch> {
    let micro_batch = MicroBatch { passes: vec![Pass::Reduced], weight: 1.0 };
    vec![micro_batch; trial.options.accumulation]
}

/// The engine's update rule.
pub fn optimizer(rule: Rule) -> Result<Box<dyn Optimizer>, OptimError> {
    let adam = |beta1, beta2, eps| MomentOptions { beta1, beta2, eps };
    Ok(match rule {
        Rule::AdamW { beta1, beta2, eps } => Box::new(AdamW::new(adam(beta1, beta2, eps))?),
        Rule::Adam { beta1, beta2, eps } => Box::new(Adam::new(adam(beta1, beta2, eps))?),
        Rule::Lion { beta1, beta2 } => Box::new(Lion::new(LionOptions { beta1, beta2 })?),
        Rule::Adagrad { eps } => {
            Box::new(Adagrad::new(AdagradOptions { eps, ..AdagradOptions::default() })?)
        }
        Rule::Sgd { momentum } => Box::new(Sgd::new(Momentum::Classical(momentum))?),
    })
}

/// The elements as f32; exact.
pub fn to_f32(view: View<'_>) -> Vec<f32> {
    let mut wide = Buffer::heap(Numel(view.numel().0), DType::F32);
    kernels::cast(view, wide.view_mut());
    wide.f32().to_vec()
}
