//! One training, run by the engine in a simulated world and by the oracle.

use oxizero::{
    Engine, EngineError, EngineOptions, GradIn, GroupOptions, OptimizerSetup, Reduction,
    StepOutcome,
};
use oxizero_comm::Communicator;
use oxizero_core::{DType, LossScale, Numel, ParamId, ParamSpec, Precision, Stage, UnitId};
use oxizero_device::{Buffer, View, kernels};
use oxizero_optim::{Adam, AdamW, LrSchedule, MomentOptions, Momentum, OptimError, Optimizer, Sgd};

use crate::oracle::{Adds, Average, Oracle, Param, Rule, Setup, Step};
use crate::{round, world};

/// A training: a model, its gradients, and what is asked for.
#[derive(Clone)]
pub struct Trial {
    /// The parameters, units ascending from 0.
    pub specs: Vec<ParamSpec>,
    /// Their initial weights.
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
    /// What each loss was multiplied by.
    pub loss_scale: f32,
    /// The gradients.
    pub backward: Backward,
    /// Whether gradients are read before a step.
    pub reads: Reads,
}

/// Whether gradients are read before a step. It changes who reduces a window, and no number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reads {
    /// All of them.
    All,
    /// None: the step reduces them.
    None,
}

/// The contributions to a parameter, from where and its model weights; none if it is not used.
pub type Backward = fn(At, &[f32]) -> Vec<Vec<f32>>;

/// Where a gradient arises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// The window, from 0.
    pub step: usize,
    /// The micro-batch in the window, from 0.
    pub micro: usize,
    /// The rank.
    pub rank: usize,
    /// The parameter.
    pub param: usize,
}

/// What a training leaves on one rank; every number as f32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trained {
    /// By window: its outcome.
    pub outcomes: Vec<Outcome>,
    /// By window and parameter: the gradient before clipping; empty for a frozen parameter. No
    /// parameters where gradients are not read.
    pub grads: Vec<Vec<Vec<f32>>>,
    /// By parameter: the model weights at the end.
    pub weights: Vec<Vec<f32>>,
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
            loss_scale: 1.0,
            backward,
            reads: Reads::All,
        }
    }

    /// Trains with the engine as the rank of `comm`, and hands the engine over too.
    pub fn engine(&self, comm: Box<dyn Communicator>) -> Result<(Trained, Engine), EngineError> {
        let mut engine = self.start(comm)?;
        let mut trained = Trained::default();
        for step in 0..self.steps {
            let (outcome, grads) = self.window(&mut engine, step)?;
            trained.outcomes.push(match outcome {
                StepOutcome::Applied { norm_before, .. } => Some(norm_before),
                _ => None,
            });
            trained.grads.push(grads);
        }
        trained.weights = self.weights(&mut engine)?;
        Ok((trained, engine))
    }

    /// Trains with the engine in a simulated world; by rank.
    ///
    /// # Panics
    ///
    /// If a rank fails.
    pub fn run(&self) -> Vec<Trained> {
        world::run(self.ranks, |comm| match self.engine(comm) {
            Ok((trained, _)) => trained,
            Err(error) => panic!("{error}"),
        })
    }

    /// An engine that has not trained yet.
    pub fn start(&self, comm: Box<dyn Communicator>) -> Result<Engine, EngineError> {
        let optimizer = OptimizerSetup {
            rule: optimizer(self.rule)?,
            groups: self.groups.clone(),
            schedule: LrSchedule::constant(0),
        };
        let mut initial =
            |param: ParamId, weights: &mut [f32]| weights.copy_from_slice(&self.initial[param.0]);
        let specs = self.specs.clone();
        Engine::new(specs, self.order(), self.options.clone(), optimizer, comm, &mut initial)
    }

    /// Runs one window as a front-end does, and returns the gradients that it read.
    pub fn window(
        &self,
        engine: &mut Engine,
        step: usize,
    ) -> Result<(StepOutcome, Vec<Vec<f32>>), EngineError> {
        for micro in 0..self.options.accumulation - 1 {
            self.micro_batch(engine, step, micro)?;
            let outcome = engine.step()?;
            assert!(matches!(outcome, StepOutcome::Accumulated { .. }), "{outcome:?}");
        }
        self.micro_batch(engine, step, self.options.accumulation - 1)?;
        let mut grads = Vec::new();
        let read = if self.reads == Reads::All { self.specs.len() } else { 0 };
        for param in 0..read {
            let grad = engine.full_grad(ParamId(param))?;
            grads.push(grad.map(|grad| to_f32(grad.view())).unwrap_or_default());
        }
        Ok((engine.step()?, grads))
    }

    /// Runs one micro-batch, up to its `backward_end`.
    pub fn micro_batch(
        &self,
        engine: &mut Engine,
        step: usize,
        micro: usize,
    ) -> Result<(), EngineError> {
        let rank = engine.communicator().rank().0;
        let loss_scale = LossScale::new(self.loss_scale)?;
        for unit in self.order() {
            engine.pre_forward(unit)?;
            engine.post_forward(unit)?;
        }
        for unit in self.order().into_iter().rev() {
            engine.pre_backward(unit)?;
            for param in engine.unit_weights(unit)?.params.iter().filter(|param| param.trainable) {
                let at = At { step, micro, rank, param: param.param.0 };
                for grad in (self.backward)(at, &to_f32(param.view())) {
                    let values = View::F32(&grad);
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

    /// Trains with the oracle.
    pub fn oracle(&self) -> Trained {
        let mut oracle = self.start_oracle();
        let mut trained = Trained::default();
        for step in 0..self.steps {
            let Step { grads, norm, applied } =
                oracle.step(1.0, &mut |micro, rank, param, weights| {
                    (self.backward)(At { step, micro, rank, param }, weights)
                });
            trained.outcomes.push(applied.then_some(norm));
            trained.grads.push(self.stored(&grads));
        }
        trained.weights = oracle.states().iter().map(|state| state.model.clone()).collect();
        trained
    }

    /// Gradients as they are read: in the accumulation dtype.
    fn stored(&self, grads: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let stored = |(grads, spec): (&Vec<f32>, &ParamSpec)| {
            let (_, dtype) = self.dtypes(spec);
            grads.iter().map(|grad| round(*grad, dtype)).collect()
        };
        grads.iter().zip(&self.specs).map(stored).collect()
    }

    /// What travels, and what adds up. A parameter of another dtype than the model's takes its own
    /// in the places where the model's was asked for.
    fn dtypes(&self, spec: &ParamSpec) -> (DType, DType) {
        let Precision { model, reduce, accumulate, .. } = self.options.precision;
        let own = |dtype: DType| if dtype == model { spec.dtype } else { dtype };
        (own(reduce), if accumulate == DType::F32 { DType::F32 } else { own(reduce) })
    }

    fn start_oracle(&self) -> Oracle {
        let options = &self.options;
        let setup = Setup {
            ranks: self.ranks,
            accumulation: options.accumulation,
            adds: match options.stage {
                Stage::Zero0 | Stage::Zero1 => Adds::RankFirst,
                Stage::Zero2 | Stage::Zero3 => Adds::MicroBatchFirst,
            },
            average: match options.reduction {
                Reduction::Mean => Average::Mean,
                Reduction::Sum => Average::Sum,
                Reduction::Weighted => panic!("the oracle knows no weights"),
            },
            loss_scale: self.loss_scale,
            clip_norm: options.clip_norm,
            rule: self.rule,
        };
        let param = |(spec, initial): (&ParamSpec, &Vec<f32>)| {
            let (reduce, accumulate) = self.dtypes(spec);
            let group = self.groups[spec.group.0];
            Param {
                initial: initial.clone(),
                model: spec.dtype,
                reduce,
                accumulate,
                lr: group.lr,
                weight_decay: group.weight_decay,
                trainable: spec.trainable,
            }
        };
        Oracle::new(setup, self.specs.iter().zip(&self.initial).map(param).collect())
    }

    /// The order in which forward uses the units.
    pub fn order(&self) -> Vec<UnitId> {
        let mut units: Vec<_> = self.specs.iter().map(|spec| spec.unit).collect();
        units.sort_unstable();
        units.dedup();
        units
    }
}

fn optimizer(rule: Rule) -> Result<Box<dyn Optimizer>, OptimError> {
    let adam = |beta1, beta2, eps| MomentOptions { beta1, beta2, eps };
    Ok(match rule {
        Rule::AdamW { beta1, beta2, eps } => Box::new(AdamW::new(adam(beta1, beta2, eps))?),
        Rule::Adam { beta1, beta2, eps } => Box::new(Adam::new(adam(beta1, beta2, eps))?),
        Rule::Sgd { momentum } => Box::new(Sgd::new(Momentum::Classical(momentum))?),
    })
}

/// The elements as f32; exact.
pub fn to_f32(view: View<'_>) -> Vec<f32> {
    let mut wide = Buffer::heap(Numel(view.numel().0), DType::F32);
    kernels::cast(view, wide.view_mut());
    wide.f32().to_vec()
}
