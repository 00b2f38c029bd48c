//! The oracle: plain data-parallel training, one loop after another.
//!
//! Every rank's gradients are there at once, nothing is sharded, and nothing is fast. Shares no
//! code with the engine, its kernels, its collectives or its update rules, or it would share their
//! faults: even the rounding to bf16 and f16 is its own (`rounding.rs`).

use oxizero_core::DType;

use crate::rounding::round;

/// What training is asked for.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Ranks.
    pub ranks: usize,
    /// Micro-batches in a window, on each rank.
    pub accumulation: usize,
    /// What happens to a micro-batch's gradient.
    pub adds: Adds,
    /// What the sum is divided by.
    pub average: Average,
    /// What the loss was multiplied by.
    pub loss_scale: f32,
    /// The largest norm that is not clipped.
    pub clip_norm: Option<f64>,
    /// The update rule.
    pub rule: Rule,
}

/// What happens to a micro-batch's gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adds {
    /// Each rank adds up its window, then ranks are summed: ZeRO stages 0 and 1.
    RankFirst,
    /// Each micro-batch is summed over ranks, then added up: ZeRO stages 2 and 3.
    MicroBatchFirst,
}

/// What the sum over ranks and micro-batches is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// Ranks times micro-batches.
    Mean,
    /// One.
    Sum,
}

/// The update rules.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Adam whose decay shrinks the weights beside the update.
    AdamW {
        /// The first moment's averaging factor.
        beta1: f64,
        /// The second moment's.
        beta2: f64,
        /// Added to the denominator.
        eps: f64,
    },
    /// Adam whose decay is added to the gradient.
    Adam {
        /// The first moment's averaging factor.
        beta1: f64,
        /// The second moment's.
        beta2: f64,
        /// Added to the denominator.
        eps: f64,
    },
    /// Gradient descent; its decay is added to the gradient.
    Sgd {
        /// How much of the last update stays; 0 for none.
        momentum: f64,
    },
}

/// One parameter at the start.
#[derive(Clone, Debug)]
pub struct Param {
    /// The f32 weights.
    pub initial: Vec<f32>,
    /// The dtype of the model weights.
    pub model: DType,
    /// The dtype in which one micro-batch's gradient travels.
    pub reduce: DType,
    /// The dtype of sums over micro-batches.
    pub accumulate: DType,
    /// The learning rate.
    pub lr: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// Whether it is trained.
    pub trainable: bool,
}

/// One parameter in training; every number as f32, rounded to its dtype.
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
    /// The gradients before clipping, by parameter; empty for a frozen one.
    pub grads: Vec<Vec<f32>>,
    /// The norm of all of them.
    pub norm: f64,
    /// Whether the weights were updated; they are not if an element is infinite or not a number.
    pub applied: bool,
}

/// Plain data-parallel training.
#[derive(Clone, Debug)]
pub struct Oracle {
    setup: Setup,
    params: Vec<Param>,
    states: Vec<State>,
}

/// The gradients of one window: `(micro-batch, rank, parameter, its model weights)` to the
/// contributions of that micro-batch, in their order. None at all means that it was not used.
pub type Backward<'a> = dyn FnMut(usize, usize, usize, &[f32]) -> Vec<Vec<f32>> + 'a;

impl Oracle {
    /// Training that has not begun.
    pub fn new(setup: Setup, params: Vec<Param>) -> Self {
        let state = |param: &Param| State {
            model: param.initial.iter().map(|weight| round(*weight, param.model)).collect(),
            master: param.initial.clone(),
            first: vec![0.0; param.initial.len()],
            second: vec![0.0; param.initial.len()],
            updates: 0,
        };
        let states = params.iter().map(state).collect();
        Self { setup, params, states }
    }

    /// The parameters as they are now.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// Trains one window. `lr_factor` multiplies every learning rate.
    pub fn step(&mut self, lr_factor: f64, backward: &mut Backward<'_>) -> Step {
        let mut grads = Vec::new();
        let mut used = Vec::new();
        for index in 0..self.params.len() {
            let trainable = self.params[index].trainable;
            let window = if trainable { self.window(index, backward) } else { Vec::new() };
            used.push(window.iter().flatten().any(|contributions| !contributions.is_empty()));
            grads.push(self.reduced(index, &window));
        }
        let squares = grads.iter().flatten().map(|grad| f64::from(*grad) * f64::from(*grad));
        let norm = squares.sum::<f64>().sqrt();
        let applied = grads.iter().flatten().all(|grad| grad.is_finite());
        if applied {
            let factor = match self.setup.clip_norm {
                Some(max) if norm > max => (max / norm) as f32,
                _ => 1.0,
            };
            for index in (0..self.params.len()).filter(|index| used[*index]) {
                self.update(index, &grads[index], factor, lr_factor);
            }
        }
        Step { grads, norm, applied }
    }

    /// By micro-batch and rank, the contributions to one parameter.
    fn window(&self, index: usize, backward: &mut Backward<'_>) -> Vec<Vec<Vec<Vec<f32>>>> {
        let model = &self.states[index].model;
        let ranks = |micro| (0..self.setup.ranks).map(move |rank| (micro, rank));
        let mut window = Vec::new();
        for micro in 0..self.setup.accumulation {
            let of_rank = ranks(micro).map(|(micro, rank)| backward(micro, rank, index, model));
            window.push(of_rank.collect());
        }
        window
    }

    /// The sum over ranks and micro-batches, divided.
    fn reduced(&self, index: usize, window: &[Vec<Vec<Vec<f32>>>]) -> Vec<f32> {
        let param = &self.params[index];
        let numel = if param.trainable { param.initial.len() } else { 0 };
        let count = match self.setup.average {
            Average::Mean => (self.setup.ranks * self.setup.accumulation) as f64,
            Average::Sum => 1.0,
        };
        let divisor = (count * f64::from(self.setup.loss_scale)) as f32;
        let element = |element: usize| {
            let at = |contribution: &Vec<f32>| contribution[element];
            let by_rank = |ranks: &Vec<Vec<Vec<f32>>>| -> Vec<Vec<f32>> {
                ranks.iter().map(|rank| rank.iter().map(at).collect()).collect()
            };
            let window: Vec<_> = window.iter().map(by_rank).collect();
            let sum = match self.setup.adds {
                Adds::RankFirst => rank_first(&window, param),
                Adds::MicroBatchFirst => micro_batch_first(&window, param),
            };
            sum / divisor
        };
        (0..numel).map(element).collect()
    }

    fn update(&mut self, index: usize, grads: &[f32], factor: f32, lr_factor: f64) {
        let (param, state) = (&self.params[index], &mut self.states[index]);
        state.updates += 1;
        let (lr, decay, step) = (param.lr * lr_factor, param.weight_decay, state.updates as i32);
        for (element, grad) in grads.iter().enumerate() {
            let grad = flush(grad * factor, GRAD_MIN);
            let weight = &mut state.master[element];
            let (first, second) = (&mut state.first[element], &mut state.second[element]);
            match self.setup.rule {
                Rule::AdamW { beta1, beta2, eps } => {
                    *weight *= (1.0 - lr * decay) as f32;
                    *weight -= adam(grad, first, second, [beta1, beta2, eps, lr], step);
                }
                Rule::Adam { beta1, beta2, eps } => {
                    let grad = flush(grad + decay as f32 * *weight, GRAD_MIN);
                    *weight -= adam(grad, first, second, [beta1, beta2, eps, lr], step);
                }
                Rule::Sgd { momentum } => {
                    let grad = flush(grad + decay as f32 * *weight, GRAD_MIN);
                    *first = flush(momentum as f32 * *first + grad, GRAD_MIN);
                    *weight -= lr as f32 * *first;
                }
            }
            state.model[element] = round(*weight, param.model);
        }
    }
}

/// 2^-100: a gradient or first moment that is smaller counts as zero.
const GRAD_MIN: f32 = 1.0 / ((1_u128 << 100) as f32);
/// 2^-58: the square of a gradient that is smaller counts as zero.
const ROOT_MIN: f32 = 1.0 / ((1_u64 << 58) as f32);

/// What Adam and AdamW subtract (Kingma and Ba, 2015, algorithm 1, in the order of `torch.optim`).
fn adam(
    grad: f32,
    first: &mut f32,
    second: &mut f32,
    [beta1, beta2, eps, lr]: [f64; 4],
    step: i32,
) -> f32 {
    let new_part = (1.0 - beta1) as f32;
    let moved = if new_part < 0.5 {
        *first + new_part * (grad - *first)
    } else {
        grad - (grad - *first) * (1.0 - new_part)
    };
    *first = flush(moved, GRAD_MIN);
    let root = flush(grad, ROOT_MIN);
    *second = flush(*second * beta2 as f32 + (1.0 - beta2) as f32 * root * root, f32::MIN_POSITIVE);
    let (corrected1, corrected2) = (1.0 - beta1.powi(step), 1.0 - beta2.powi(step));
    let denominator = second.sqrt() / corrected2.sqrt() as f32 + eps as f32;
    (lr / corrected1) as f32 * *first / denominator
}

/// Zero where `value` is smaller than `least`.
fn flush(value: f32, least: f32) -> f32 {
    if value.abs() < least { 0.0 } else { value }
}

/// One element's sum where each rank adds up its window first. A window of one micro-batch travels
/// in the `reduce` dtype, the sum of a longer one in the `accumulate` dtype.
fn rank_first(window: &[Vec<Vec<f32>>], param: &Param) -> f32 {
    let ranks = window.first().map_or(0, Vec::len);
    let sent = (0..ranks).map(|rank| {
        let contributions: Vec<f32> = window.iter().flat_map(|micro| micro[rank].clone()).collect();
        let sum = one_by_one(&contributions, param.accumulate);
        if window.len() == 1 { round(sum, param.reduce) } else { sum }
    });
    round(tree(&sent.collect::<Vec<_>>()), param.accumulate)
}

/// One element's sum where each micro-batch is summed over ranks first.
fn micro_batch_first(window: &[Vec<Vec<f32>>], param: &Param) -> f32 {
    let mut total = None;
    for ranks in window {
        let sent = ranks
            .iter()
            .map(|contributions| round(one_by_one(contributions, param.accumulate), param.reduce));
        let sum = tree(&sent.collect::<Vec<_>>());
        let new = total.map_or(sum, |total: f32| total + sum);
        total = Some(round(new, param.accumulate));
    }
    total.unwrap_or(0.0)
}

/// The sum in order, in an accumulator of `dtype`; zero of nothing.
fn one_by_one(values: &[f32], dtype: DType) -> f32 {
    let mut values = values.iter();
    let first = values.next().map_or(0.0, |first| round(*first, dtype));
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
            initial: initial.to_vec(),
            model,
            reduce: model,
            accumulate: F32,
            lr: 1.0,
            weight_decay: 0.0,
            trainable: true,
        }
    }

    fn setup(ranks: usize, accumulation: usize) -> Setup {
        Setup {
            ranks,
            accumulation,
            adds: Adds::RankFirst,
            average: Average::Mean,
            loss_scale: 1.0,
            clip_norm: None,
            rule: Rule::Sgd { momentum: 0.0 },
        }
    }

    #[test]
    fn three_ranks_add_as_a_tree_and_average_truly() {
        assert_eq!(tree(&[1e8, 1.0, -1e8]), 0.0);
        assert_eq!(tree(&[1e8, -1e8, 1.0, 2.0]), 3.0);
        let mut oracle = Oracle::new(setup(3, 1), vec![param(&[0.0], DType::Bf16)]);
        assert_eq!(oracle.step(1.0, &mut |_, _, _, _| vec![vec![1.0]]).grads, [[1.0]]);
    }

    #[test]
    fn the_mean_is_over_ranks_and_micro_batches() {
        for adds in [Adds::RankFirst, Adds::MicroBatchFirst] {
            let setup = Setup { adds, ..setup(2, 2) };
            let mut oracle = Oracle::new(setup, vec![param(&[0.0], F32)]);
            let given = [[1.0, 5.0], [3.0, 7.0]];
            let step = oracle.step(1.0, &mut |micro, rank, _, _| vec![vec![given[micro][rank]]]);
            assert_eq!((step.grads, step.norm), (vec![vec![4.0]], 4.0));
            assert_eq!(oracle.states()[0].master, [-4.0]);
        }
    }

    /// The first step of AdamW moves by the learning rate against the sign, after the decay.
    #[test]
    fn adamw_takes_a_first_step_of_the_learning_rate() {
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 0.0 };
        let start = Param { lr: 0.25, weight_decay: 0.5, ..param(&[1.0, 1.0], F32) };
        let mut oracle = Oracle::new(Setup { rule, ..setup(1, 1) }, vec![start]);
        oracle.step(1.0, &mut |_, _, _, _| vec![vec![3.0, -5.0]]);
        for (weight, expected) in oracle.states()[0].master.iter().zip([0.625, 1.125]) {
            assert!((weight - expected).abs() < 1e-6, "{weight} {expected}"); // f32 rounding
        }
    }

    #[test]
    fn unused_parameters_stay_and_infinite_steps_are_skipped() {
        let mut oracle = Oracle::new(setup(1, 1), vec![param(&[1.0], F32), param(&[1.0], F32)]);
        oracle.step(1.0, &mut |_, _, index, _| if index == 0 { vec![vec![1.0]] } else { vec![] });
        assert!(!oracle.step(1.0, &mut |_, _, _, _| vec![vec![f32::INFINITY]]).applied);
        let weights: Vec<_> = oracle.states().iter().map(|s| (s.master[0], s.updates)).collect();
        assert_eq!(weights, [(0.0, 1), (1.0, 0)]);
    }
}
