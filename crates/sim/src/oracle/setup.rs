//! What the oracle is asked for.

use oxizero_core::DType;

use super::Norm;

/// What training is asked for.
#[derive(Clone, Debug)]
pub struct Setup {
    /// How the ranks are arranged; the last axis counts fastest.
    pub axes: Vec<Axis>,
    /// Where gradients add up first.
    pub adds: Adds,
    /// What the sum is divided by.
    pub average: Average,
    /// What losses are multiplied by.
    pub loss_scale: Scale,
    /// Whether steps with gradients that are infinite or not a number are skipped.
    pub check_finite: bool,
    /// What is clipped.
    pub norm: Norm,
    /// The largest norm that is not clipped.
    pub clip_norm: Option<f64>,
    /// The update rule.
    pub rule: Rule,
    /// What is done to gradients before they are applied.
    pub edits: Edits,
}

/// One axis along which ranks are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Ranks along it.
    pub ranks: usize,
    /// Whether they work on the same micro-batches, which then count once.
    pub same_batches: bool,
}

/// What the ranks along one axis hold of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// The same weights; their gradients add up.
    Sum,
    /// The same weights and the same gradient, which counts once.
    Copy,
    /// Consecutive equal parts of one tensor, cut along this dimension.
    Part(usize),
    /// Tensors of their own.
    Own,
}

/// What is done to gradients before they are applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edits {
    /// Nothing.
    Nothing,
    /// They are set to what they are: rounded to the accumulator's dtype.
    SetBack,
}

/// Where gradients add up first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adds {
    /// Each rank adds up its window, then ranks are summed: ZeRO stages 0 and 1.
    RankFirst,
    /// Each pass that is reduced is summed over ranks, together with those that were kept back
    /// before it; then these sums are added up: ZeRO stages 2 and 3.
    PassFirst,
}

/// What the sum over ranks and micro-batches is divided by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// The number of micro-batches, all ranks' together.
    Mean,
    /// One.
    Sum,
    /// The weights of the micro-batches, all ranks' together.
    Weighted,
}

/// What losses are multiplied by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scale {
    /// This, always.
    Fixed(f32),
    /// Half as much after overflows, twice as much after a while without.
    Dynamic {
        /// The first scale.
        initial: f32,
        /// The scale that is not halved.
        minimum: f32,
        /// Doubles after so many good steps in a row.
        window: u64,
        /// Halves at this overflow.
        hysteresis: u64,
        /// Whether hysteresis counts from the last good step; else from the last doubling.
        consecutive: bool,
    },
}

/// One micro-batch of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct MicroBatch {
    /// Its backward passes.
    pub passes: Vec<Pass>,
    /// Its weight, such as a number of tokens.
    pub weight: f64,
}

/// One backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Its gradients are reduced as they come.
    Reduced,
    /// They stay on their rank until another pass is reduced, or the window ends.
    KeptBack,
}

/// Where a gradient arises in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// The micro-batch of the rank, from 0.
    pub micro: usize,
    /// The pass of the micro-batch, from 0.
    pub pass: usize,
    /// The parameter.
    pub param: usize,
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
    /// Lion; its decay shrinks the weights beside the update.
    Lion {
        /// The average's part of the direction.
        beta1: f64,
        /// The average's factor.
        beta2: f64,
    },
    /// Adagrad; its decay is added to the gradient.
    Adagrad {
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
    /// The f32 weights of each tensor that is trained apart.
    pub initial: Vec<Vec<f32>>,
    /// The shape of one of them.
    pub shape: Vec<usize>,
    /// What the ranks along each axis hold of it.
    pub holds: Vec<Holds>,
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
