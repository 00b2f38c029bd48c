//! What the oracle says that a trial comes to.

use oxizero::Reduction;
use oxizero_core::{DType, LossScaling, ParamSpec, Precision, Stage};

use super::{At, Read, Reads, Trained, Trial};
use crate::oracle::{
    Adds, Average, Edits, Norm, Oracle, Param, Place, Rule, Scale, Setup, State, Step, whole,
};
use crate::round;

impl Trial {
    /// Trains with the oracle; by rank.
    pub fn oracle(&self) -> Vec<Trained> {
        let mut oracle = self.start_oracle();
        let (mut all, mut applied_steps) = (vec![Trained::default(); self.ranks], 0);
        for step in 0..self.steps {
            let window: Vec<_> =
                (0..self.ranks).map(|rank| self.micro_batches(step, rank)).collect();
            let warm = (applied_steps + 1).min(self.warmup_steps.max(1));
            let lr_factor = warm as f64 / self.warmup_steps.max(1) as f64;
            let done = oracle.step(lr_factor, &window, &mut |place, weights| {
                let Place { rank, micro, pass, param } = place;
                let rank = self.first_alike(param, rank);
                (self.backward)(At { step, micro, pass, rank, param, seed: self.seed }, weights)
            });
            applied_steps += u64::from(done.applied);
            let global = self.global(&oracle, &done);
            for (rank, trained) in all.iter_mut().enumerate() {
                trained.outcomes.push(done.applied.then_some(done.norm));
                trained.read(self.read_of(&oracle, &done, rank, &global));
                trained.loss_scales.push(oracle.loss_scale());
            }
        }
        for (rank, trained) in all.iter_mut().enumerate() {
            let states = self.held(&oracle, rank).map(|index| &oracle.states()[index]);
            for (state, spec) in states.zip(&self.specs) {
                trained.weights.push(state.model.clone());
                trained.states.push(self.kept(state, spec));
            }
        }
        all
    }

    /// By parameter: the instance that a rank holds.
    fn held(&self, oracle: &Oracle, rank: usize) -> impl Iterator<Item = usize> {
        let all = oracle.instances();
        let of = |param| all.iter().position(|i| i.param == param && i.holders.contains(&rank));
        let held = (0..self.specs.len()).map(of);
        held.map(|index| index.expect("every rank holds every parameter"))
            .collect::<Vec<_>>()
            .into_iter()
    }

    fn kept(&self, state: &State, spec: &ParamSpec) -> Vec<Vec<f32>> {
        let count = match self.rule {
            Rule::Sgd { .. } | Rule::Lion { .. } | Rule::Adagrad { .. } => 1,
            Rule::Adam { .. } | Rule::AdamW { .. } => 2,
        };
        let all = [&state.master, &state.first, &state.second].map(Vec::clone);
        all.into_iter().take(if spec.trainable { 1 + count } else { 0 }).collect()
    }

    /// What a rank reads.
    fn read_of(&self, oracle: &Oracle, done: &Step, rank: usize, global: &[Vec<f32>]) -> Read {
        let held = self.held(oracle, rank).zip(&self.specs);
        let grads: Vec<_> =
            held.map(|(index, spec)| self.stored(&done.grads[index], spec)).collect();
        let norms = done.norms.iter().zip(&self.specs);
        Read {
            model_grads: grads.clone(),
            grads,
            global_grads: global.to_vec(),
            grad_norms: norms.map(|(norm, spec)| spec.trainable.then_some(*norm)).collect(),
        }
    }

    /// By parameter: the gradients of all its instances together.
    fn global(&self, oracle: &Oracle, done: &Step) -> Vec<Vec<f32>> {
        let of = |(param, spec): (usize, &ParamSpec)| {
            let parts = oracle.instances().iter().zip(&done.grads);
            let parts: Vec<_> = parts
                .filter(|(instance, _)| instance.param == param && spec.trainable)
                .map(|(instance, grad)| (&instance.place[..], &grad[..]))
                .collect();
            let all = whole(&self.axes(), (&self.holds(param), &spec.shape), &parts);
            self.stored(&all, spec)
        };
        self.specs.iter().enumerate().map(of).collect()
    }

    /// A gradient as it is read: in the accumulation dtype.
    fn stored(&self, grad: &[f32], spec: &ParamSpec) -> Vec<f32> {
        let (_, dtype) = self.dtypes(spec);
        grad.iter().map(|grad| round(*grad, dtype)).collect()
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
            axes: self.axes(),
            adds: match options.stage {
                Stage::Zero0 | Stage::Zero1 => Adds::RankFirst,
                Stage::Zero2 | Stage::Zero3 => Adds::PassFirst,
            },
            average: match options.reduction {
                Reduction::Mean => Average::Mean,
                Reduction::Sum => Average::Sum,
                Reduction::Weighted => Average::Weighted,
            },
            loss_scale: scale(options.loss_scaling),
            check_finite: options.check_finite,
            norm: match options.norm {
                oxizero::Norm::One => Norm::Power(1),
                oxizero::Norm::Two => Norm::Power(2),
                oxizero::Norm::Three => Norm::Power(3),
                oxizero::Norm::Infinity => Norm::Infinity,
            },
            clip_norm: options.clip_norm,
            rule: self.rule,
            edits: if self.reads == Reads::SetBack { Edits::SetBack } else { Edits::Nothing },
        };
        let param = |(param, spec): (usize, &ParamSpec)| {
            let (reduce, accumulate) = self.dtypes(spec);
            let group = self.groups[spec.group.0];
            Param {
                initial: (0..self.instances(param).len())
                    .map(|instance| self.initial_of(param, instance))
                    .collect(),
                shape: spec.shape.clone(),
                holds: self.holds(param),
                model: spec.dtype,
                reduce,
                accumulate,
                lr: group.lr,
                weight_decay: group.weight_decay,
                trainable: spec.trainable,
            }
        };
        Oracle::new(setup, self.specs.iter().enumerate().map(param).collect())
    }
}

fn scale(scaling: LossScaling) -> Scale {
    match scaling {
        LossScaling::Fixed(scale) => Scale::Fixed(scale.get()),
        LossScaling::Dynamic(dynamic) => Scale::Dynamic {
            initial: dynamic.initial,
            minimum: dynamic.minimum,
            window: dynamic.loss_scale_window,
            hysteresis: dynamic.hysteresis,
            consecutive: dynamic.consecutive_hysteresis,
        },
    }
}
