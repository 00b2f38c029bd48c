//! What a model author writes.

use burn::module::Module;
use burn::tensor::Tensor;
use oxizero::segment::Draw;
use oxizero_core::Random;

/// A piece of a model that turns one activation into the next. Its parameters are its own.
///
/// Tensors may have any shape of rank 3; `[batch, positions, features]` is usual. A layer whose
/// output is the loss returns it as `[1, 1, 1]`.
pub trait Layer<B>: Module + 'static {
    /// Runs forward. Called again when the engine recomputes, and must then do the same: draw from
    /// [`Context::random`], as [`dropout`](crate::dropout) does. `burn::nn::Dropout` draws from one
    /// generator of the whole process; with ranks as threads its masks do not repeat, and gradients
    /// would be wrong.
    fn run(&self, context: &Context<'_, B>, input: Tensor<3>) -> Tensor<3>;
}

/// The piece of a model that comes first, and makes its output from the batch alone.
pub trait Source<B>: Module + 'static {
    /// Runs forward. Called again when the engine recomputes, and must then do the same: draw from
    /// [`Context::random`], as [`dropout`](crate::dropout) does. `burn::nn::Dropout` draws from one
    /// generator of the whole process; with ranks as threads its masks do not repeat, and gradients
    /// would be wrong.
    fn start(&self, context: &Context<'_, B>) -> Tensor<3>;
}

/// What every layer may look at besides its input.
#[derive(Debug)]
pub struct Context<'a, B> {
    /// Tokens, targets and the like.
    pub batch: &'a B,
    /// Seeds what is drawn at random.
    pub draw: Draw,
}

impl<B> Context<'_, B> {
    /// The generator for one use of random numbers in a layer, or `None` in evaluation.
    ///
    /// It draws the same numbers when the layer is recomputed, whatever other threads do; burn's
    /// own generator belongs to the whole process. `site` tells a layer's uses apart.
    pub fn random(&self, site: u64) -> Option<Random> {
        self.draw.seed.map(|seed| Random::for_path(seed, &[site]))
    }
}
