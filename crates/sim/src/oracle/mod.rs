//! The oracle: plain training over ranks, one loop after another.
//!
//! Every rank's gradients are there at once, nothing is sharded, and nothing is fast. Where ranks
//! hold different tensors of a parameter, each is trained apart. Shares no code with the engine,
//! its kernels, its collectives or its update rules, or it would share their faults: even the
//! rounding to bf16 and f16 (`rounding.rs`) and the places of ranks (`places.rs`) are its own.

mod norm;
mod places;
mod rules;
mod setup;

pub use norm::Norm;
pub use places::{Instance, first_along, instances, whole};
pub use setup::{
    Adds, Average, Axis, Edits, Holds, MicroBatch, Param, Pass, Place, Rule, Scale, Setup,
};

use oxizero_core::DType;

use crate::round;

/// One tensor in training; every number as f32, rounded to its dtype.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// What forward reads.
    pub model: Vec<f32>,
    /// What the update rule changes.
    pub master: Vec<f32>,
    /// The first moment, or the momentum.
    pub first: Vec<f32>,
    /// The second moment.
    pub second: Vec<f32>,
    /// Updates so far.
    pub updates: u64,
}

/// What a step did.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The gradients before clipping, by instance; empty for a frozen one.
    pub grads: Vec<Vec<f32>>,
    /// By parameter: the norm of the gradients of all its instances.
    pub norms: Vec<f64>,
    /// The norm of all that is applied.
    pub norm: f64,
    /// Whether the weights were updated.
    pub applied: bool,
}

/// Plain training.
#[derive(Clone, Debug)]
pub struct Oracle {
    setup: Setup,
    params: Vec<Param>,
    instances: Vec<Instance>,
    states: Vec<State>,
    /// What losses are multiplied by now.
    scale: f32,
    good_steps: u64,
    overflows: u64,
}

/// The gradients of one pass before the loss scale, from its place and the model weights: the
/// contributions in their order. None at all means that the parameter was not used.
pub type Backward<'a> = dyn FnMut(Place, &[f32]) -> Vec<Vec<f32>> + 'a;

/// What a rank sends at once: these micro-batches and passes.
type Turn = Vec<(usize, usize)>;

impl Oracle {
    /// Training that has not begun.
    pub fn new(setup: Setup, params: Vec<Param>) -> Self {
        let (mut instances, mut states) = (Vec::new(), Vec::new());
        for (index, param) in params.iter().enumerate() {
            let all = places::instances(&setup.axes, index, &param.holds);
            assert_eq!(all.len(), param.initial.len(), "each instance has initial weights");
            instances.extend(all);
            states.extend(param.initial.iter().map(|initial| State {
                model: initial.iter().map(|weight| round(*weight, param.model)).collect(),
                master: initial.clone(),
                first: vec![0.0; initial.len()],
                second: vec![0.0; initial.len()],
                updates: 0,
            }));
        }
        let scale = match setup.loss_scale {
            Scale::Fixed(scale) | Scale::Dynamic { initial: scale, .. } => scale,
        };
        Self { setup, params, instances, states, scale, good_steps: 0, overflows: 0 }
    }

    /// The tensors that are trained, parameter by parameter.
    pub fn instances(&self) -> &[Instance] {
        &self.instances
    }

    /// The instances as they are now.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// What losses are multiplied by now.
    pub fn loss_scale(&self) -> f32 {
        self.scale
    }

    /// Trains one window, by rank its micro-batches. `lr_factor` multiplies every learning rate.
    pub fn step(
        &mut self,
        lr_factor: f64,
        window: &[Vec<MicroBatch>],
        backward: &mut Backward<'_>,
    ) -> Step {
        let divisor = (self.count(window) * f64::from(self.scale)) as f32;
        let turns: Vec<_> = window.iter().map(|rank| self.turns(rank)).collect();
        let (mut grads, mut used) = (Vec::new(), Vec::new());
        for index in 0..self.instances.len() {
            let sent = self.sent(index, &turns, backward);
            used.push(sent.iter().flatten().any(|contributions| !contributions.is_empty()));
            grads.push(self.reduced(index, &sent, &turns, divisor));
        }
        let norms = (0..self.params.len()).map(|param| self.norm_of(param, &grads)).collect();
        let mut applied_grads = grads.clone();
        if self.setup.edits == Edits::SetBack {
            for (grad, instance) in applied_grads.iter_mut().zip(&self.instances) {
                let dtype = self.params[instance.param].accumulate;
                grad.iter_mut().for_each(|grad| *grad = round(*grad, dtype));
            }
        }
        let norm = self.setup.norm.of(applied_grads.iter().flatten());
        let finite = applied_grads.iter().flatten().all(|grad| grad.is_finite());
        let applied = finite || !self.setup.check_finite;
        if applied {
            let factor = match self.setup.clip_norm {
                Some(max) if norm > max => (max / norm) as f32,
                _ => 1.0,
            };
            for (index, grad) in applied_grads.iter().enumerate() {
                let param = &self.params[self.instances[index].param];
                if param.trainable && self.is_used(index, &used) {
                    let by = (self.setup.rule, param);
                    self.states[index].update(by, grad, factor, lr_factor);
                }
            }
        }
        self.adjust_scale(applied);
        Step { grads, norms, norm, applied }
    }

    /// What the sum is divided by, but for the loss scale: ranks on the same micro-batches count
    /// once.
    fn count(&self, window: &[Vec<MicroBatch>]) -> f64 {
        let axes = &self.setup.axes;
        let counts = |rank: usize| first_along(axes, rank, |axis| axes[axis].same_batches) == rank;
        let ranks = window.iter().enumerate().filter(|(rank, _)| counts(*rank));
        let micro_batches = ranks.flat_map(|(_, rank)| rank);
        match self.setup.average {
            Average::Mean => micro_batches.count() as f64,
            Average::Sum => 1.0,
            Average::Weighted => micro_batches.map(|micro_batch| micro_batch.weight).sum(),
        }
    }

    /// What a rank sends together in its window, in order.
    fn turns(&self, window: &[MicroBatch]) -> Vec<Turn> {
        let (mut all, mut next) = (Vec::new(), Vec::new());
        for (micro, micro_batch) in window.iter().enumerate() {
            for (pass, kind) in micro_batch.passes.iter().enumerate() {
                next.push((micro, pass));
                if (self.setup.adds, kind) == (Adds::PassFirst, &Pass::Reduced) {
                    all.push(std::mem::take(&mut next));
                }
            }
        }
        if !next.is_empty() {
            all.push(next);
        }
        all
    }

    /// By rank whose gradients add up, and by turn: the contributions to an instance.
    fn sent(
        &self,
        index: usize,
        turns: &[Vec<Turn>],
        backward: &mut Backward<'_>,
    ) -> Vec<Vec<Vec<Vec<f32>>>> {
        let Instance { param, adds, .. } = &self.instances[index];
        let mut of_pass = |rank: usize, micro: usize, pass: usize| {
            let mut all =
                backward(Place { rank, micro, pass, param: *param }, &self.states[index].model);
            all.iter_mut().flatten().for_each(|value| *value *= self.scale);
            all
        };
        let mut of_turn = |rank: usize, turn: &Turn| {
            turn.iter().flat_map(|(micro, pass)| of_pass(rank, *micro, *pass)).collect()
        };
        let mut of_rank =
            |rank: &usize| turns[*rank].iter().map(|turn| of_turn(*rank, turn)).collect();
        let adds = if self.params[*param].trainable { &adds[..] } else { &[] };
        adds.iter().map(&mut of_rank).collect()
    }

    /// The sum over ranks of what each `sent`, divided.
    fn reduced(
        &self,
        index: usize,
        sent: &[Vec<Vec<Vec<f32>>>],
        turns: &[Vec<Turn>],
        divisor: f32,
    ) -> Vec<f32> {
        let param = &self.params[self.instances[index].param];
        let element = |element: usize| {
            let mut total = None;
            for turn in 0..sent.first().map_or(0, Vec::len) {
                // The most of any rank, so that all parameters of a turn travel alike.
                let passes = turns.iter().filter_map(|rank| rank.get(turn)).map(Vec::len).max();
                let travels = if passes == Some(1) { param.reduce } else { param.accumulate };
                let of_rank = |rank: &Vec<Vec<Vec<f32>>>| {
                    let values = rank[turn].iter().map(|values| values[element]);
                    round(one_by_one(values, param.accumulate), travels)
                };
                let sum = tree(&sent.iter().map(of_rank).collect::<Vec<_>>());
                let new = total.map_or(sum, |total: f32| total + sum);
                total = Some(round(new, param.accumulate));
            }
            total.unwrap_or(0.0) / divisor
        };
        let numel = self.states[index].master.len();
        (0..if param.trainable { numel } else { 0 }).map(element).collect()
    }

    /// The norm of a parameter's gradients, of all its instances.
    fn norm_of(&self, param: usize, grads: &[Vec<f32>]) -> f64 {
        let all = self.instances.iter().zip(grads);
        self.setup.norm.of(all.filter(|(one, _)| one.param == param).flat_map(|(_, grad)| grad))
    }

    /// Whether a rank used the tensor that the instance is a part of, by instance used or not.
    fn is_used(&self, index: usize, used: &[bool]) -> bool {
        let Instance { param, place, .. } = &self.instances[index];
        let same_tensor = |other: &Instance| {
            let mut along = other.place.iter().zip(place).zip(&self.params[*param].holds);
            other.param == *param && along.all(|((a, b), holds)| *holds != Holds::Own || a == b)
        };
        self.instances.iter().zip(used).any(|(other, used)| *used && same_tensor(other))
    }

    /// As DeepSpeed's dynamic loss scaler.
    fn adjust_scale(&mut self, applied: bool) {
        let Scale::Dynamic { minimum, window, hysteresis, consecutive, .. } = self.setup.loss_scale
        else {
            return;
        };
        if applied {
            self.good_steps += 1;
            let grows = self.good_steps.is_multiple_of(window);
            self.scale *= if grows { 2.0 } else { 1.0 };
            self.overflows *= u64::from(!(grows || consecutive));
        } else {
            self.good_steps = 0;
            self.overflows = hysteresis.min(self.overflows + 1);
            if self.overflows == hysteresis {
                self.scale = minimum.max(self.scale / 2.0);
            }
        }
    }
}

/// The sum in order, in an accumulator of `dtype`; zero of nothing.
fn one_by_one(mut values: impl Iterator<Item = f32>, dtype: DType) -> f32 {
    let first = values.next().map_or(0.0, |first| round(first, dtype));
    values.fold(first, |sum, value| round(sum + value, dtype))
}

/// The sum over ranks by a balanced binary tree: of three, `(a + b) + c`.
fn tree(values: &[f32]) -> f32 {
    match values {
        [] => 0.0,
        [value] => *value,
        _ => {
            let (left, right) = values.split_at(values.len().next_power_of_two() / 2);
            tree(left) + tree(right)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F32: DType = DType::F32;

    fn param(initial: &[f32], model: DType) -> Param {
        Param {
            initial: vec![initial.to_vec()],
            shape: vec![initial.len()],
            holds: vec![Holds::Sum],
            model,
            reduce: model,
            accumulate: F32,
            lr: 1.0,
            weight_decay: 0.0,
            trainable: true,
        }
    }

    fn setup(ranks: usize) -> Setup {
        Setup {
            axes: vec![Axis { ranks, same_batches: false }],
            adds: Adds::RankFirst,
            average: Average::Mean,
            loss_scale: Scale::Fixed(1.0),
            check_finite: true,
            norm: Norm::Power(2),
            clip_norm: None,
            rule: Rule::Sgd { momentum: 0.0 },
            edits: Edits::Nothing,
        }
    }

    fn window(ranks: usize, passes: &[Pass]) -> Vec<Vec<MicroBatch>> {
        let micro_batch = |pass: &Pass| MicroBatch { passes: vec![*pass], weight: 1.0 };
        vec![passes.iter().map(micro_batch).collect(); ranks]
    }

    #[test]
    fn three_ranks_add_as_a_tree_and_average_truly() {
        assert_eq!(tree(&[1e8, 1.0, -1e8]), 0.0);
        assert_eq!(tree(&[1e8, -1e8, 1.0, 2.0]), 3.0);
        let mut oracle = Oracle::new(setup(3), vec![param(&[0.0], DType::Bf16)]);
        let window = window(3, &[Pass::Reduced]);
        assert_eq!(oracle.step(1.0, &window, &mut |_, _| vec![vec![1.0]]).grads, [[1.0]]);
    }

    #[test]
    fn the_mean_is_over_ranks_and_micro_batches() {
        for adds in [Adds::RankFirst, Adds::PassFirst] {
            let setup = Setup { adds, ..setup(2) };
            let mut oracle = Oracle::new(setup, vec![param(&[0.0], F32)]);
            let given = [[1.0, 3.0], [5.0, 7.0]];
            let window = window(2, &[Pass::Reduced; 2]);
            let step = oracle.step(1.0, &window, &mut |at, _| vec![vec![given[at.rank][at.micro]]]);
            assert_eq!((step.grads, step.norm), (vec![vec![4.0]], 4.0));
            assert_eq!(oracle.states()[0].master, [-4.0]);
        }
    }

    /// 1.003 is 1 in bf16, where it travels alone, and not in f32, where it travels with another.
    #[test]
    fn what_is_kept_back_travels_in_the_accumulation_dtype() {
        use Pass::{KeptBack, Reduced};
        for (passes, sum) in [
            ([Reduced, Reduced], 2.0),
            ([KeptBack, Reduced], 2.0 * 1.003_f32),
            ([KeptBack, KeptBack], 2.0 * 1.003),
            ([Reduced, KeptBack], 2.0),
        ] {
            let setup = Setup { adds: Adds::PassFirst, average: Average::Sum, ..setup(1) };
            let mut oracle = Oracle::new(setup, vec![param(&[0.0], DType::Bf16)]);
            let step = oracle.step(1.0, &window(1, &passes), &mut |_, _| vec![vec![1.003]]);
            assert_eq!(step.grads, [[sum]], "{passes:?}");
        }
    }

    /// The first step of AdamW moves by the learning rate against the sign, after the decay.
    #[test]
    fn adamw_takes_a_first_step_of_the_learning_rate() {
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 0.0 };
        let start = Param { lr: 0.25, weight_decay: 0.5, ..param(&[1.0, 1.0], F32) };
        let mut oracle = Oracle::new(Setup { rule, ..setup(1) }, vec![start]);
        oracle.step(1.0, &window(1, &[Pass::Reduced]), &mut |_, _| vec![vec![3.0, -5.0]]);
        for (weight, expected) in oracle.states()[0].master.iter().zip([0.625, 1.125]) {
            assert!((weight - expected).abs() < 1e-6, "{weight} {expected}"); // f32 rounding
        }
    }

    #[test]
    fn unused_parameters_stay_and_infinite_steps_are_skipped() {
        let mut oracle = Oracle::new(setup(1), vec![param(&[1.0], F32), param(&[1.0], F32)]);
        let window = window(1, &[Pass::Reduced]);
        oracle.step(1.0, &window, &mut |at, _| match at.param {
            0 => vec![vec![1.0]],
            _ => vec![],
        });
        assert!(!oracle.step(1.0, &window, &mut |_, _| vec![vec![f32::INFINITY]]).applied);
        let weights: Vec<_> = oracle.states().iter().map(|s| (s.master[0], s.updates)).collect();
        assert_eq!(weights, [(0.0, 1), (1.0, 0)]);
    }

    /// Two ranks with an expert each, and a parameter of both: the micro-batches of both count for
    /// all, and a copy counts once.
    #[test]
    fn experts_train_apart_and_copies_count_once() {
        let expert = Param {
            initial: vec![vec![0.0], vec![1.0]],
            holds: vec![Holds::Own],
            ..param(&[0.0], F32)
        };
        for (holds, sum) in [(Holds::Copy, 12.0), (Holds::Sum, 24.0)] {
            let shared = Param { holds: vec![holds], ..param(&[0.0], F32) };
            let mut oracle = Oracle::new(setup(2), vec![shared, expert.clone()]);
            let window = window(2, &[Pass::Reduced]);
            let step = oracle.step(1.0, &window, &mut |at, _| match (at.param, at.rank) {
                (0, _) => vec![vec![12.0]],
                (_, 0) => vec![],
                _ => vec![vec![6.0]],
            });
            assert_eq!(step.grads, [[sum / 2.0], [0.0], [3.0]]);
            assert_eq!(step.norms, [f64::from(sum) / 2.0, 3.0]);
            let updates: Vec<_> = oracle.states().iter().map(|state| state.updates).collect();
            assert_eq!(updates, [1, 0, 1]);
        }
    }

    /// Hysteresis 2: the first overflow keeps the scale, the second halves it; two good steps
    /// double it.
    #[test]
    fn a_dynamic_scale_falls_and_grows() {
        let loss_scale = Scale::Dynamic {
            initial: 8.0,
            minimum: 1.0,
            window: 2,
            hysteresis: 2,
            consecutive: false,
        };
        let mut oracle = Oracle::new(Setup { loss_scale, ..setup(1) }, vec![param(&[1.0], F32)]);
        let window = window(1, &[Pass::Reduced]);
        let scales = [f32::NAN, f32::NAN, 1.0, 1.0, 1.0, f32::INFINITY].map(|grad| {
            oracle.step(1.0, &window, &mut |_, _| vec![vec![grad]]);
            oracle.loss_scale()
        });
        assert_eq!(scales, [8.0, 4.0, 4.0, 8.0, 8.0, 8.0]);
    }

    #[test]
    fn a_norm_shows_what_is_not_a_number() {
        let grads = [3.0, f32::NAN, -4.0];
        for norm in [Norm::Power(2), Norm::Infinity] {
            assert!(norm.of(grads.iter()).is_nan());
        }
        assert_eq!(Norm::Infinity.of([3.0, -4.0].iter()), 4.0);
        assert_eq!(Norm::Power(2).of([3.0, -4.0].iter()), 5.0);
    }
}
