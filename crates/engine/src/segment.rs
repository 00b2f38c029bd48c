//! A model as a chain of segments, each with the weights of one unit.
//!
//! A segment knows its own arithmetic and nothing else: not where its weights come from, nor where
//! its gradients go. Knows no framework; a front-end implements [`Segment`] for its modules.

use oxizero_core::LossScale;

use crate::{EngineError, GradView, UnitWeights};

/// One differentiable piece of a model.
pub trait Segment {
    /// What every segment may look at besides its input: tokens and targets.
    type Batch;
    /// What flows from one segment to the next, without any tape.
    type Value: Clone;
    /// What backward needs of forward; it may hold views of the weights.
    type Tape;

    /// Runs forward and keeps nothing. Where the draw has a seed (in training) the output equals
    /// [`forward`](Self::forward)'s to the bit.
    fn infer(&self, input: Input<'_, Self>) -> Self::Value;

    /// Runs forward, and records what [`backward`](Self::backward) needs.
    fn forward(&self, input: Input<'_, Self>) -> (Self::Value, Self::Tape);

    /// The vector-Jacobian product: gives every parameter's gradient to `sink`, and returns the
    /// gradient of the input, or `None` where the segment had no input.
    ///
    /// `grad` is the gradient of the output.
    fn backward(
        &self,
        tape: Self::Tape,
        grad: OutputGrad<Self::Value>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Self::Value>, EngineError>;
}

/// What backward starts from.
#[derive(Clone, Debug)]
pub enum OutputGrad<V> {
    /// The output is the loss, whose gradient is the loss scale.
    Loss(LossScale),
    /// What the next segment's backward returned.
    Value(V),
}

/// What a segment runs on.
pub struct Input<'a, S: Segment + ?Sized> {
    /// The unit's full weights, in the order in which the unit's parameters were declared.
    pub weights: &'a UnitWeights,
    /// Tokens, targets and the like.
    pub batch: &'a S::Batch,
    /// The previous segment's output; `None` for the first.
    pub value: Option<S::Value>,
    /// For random draws such as dropout.
    pub draw: Draw,
}

/// Seeds a segment's random draws, so that recomputation repeats them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Distinct for every (run's seed, rank, micro-batch, segment); `None` in evaluation, where
    /// nothing is dropped.
    pub seed: Option<u64>,
}

/// Receives the gradients of a unit's parameters.
pub trait GradSink {
    /// Takes the gradient of the unit's parameter `index`; the engine copies what it needs.
    fn grad(&mut self, index: usize, grad: GradView<'_>) -> Result<(), EngineError>;
}
