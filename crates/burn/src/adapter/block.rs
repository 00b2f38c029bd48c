//! A burn module as the engine's segment.

use burn::tensor::{Device, Tensor};
use oxizero::EngineError;
use oxizero::segment::{Draw, GradSink, Input, OutputGrad, Segment};
use oxizero_core::{DType, LossScale};

use super::Context;
use super::template::{Binding, TapeMode, Template};

/// One piece of a [`Model`](super::Model), with the types of its module hidden.
pub struct Block<B> {
    pub(super) template: Box<dyn Template<B>>,
    /// For each use of a parameter in the module, its index in the unit.
    pub(super) slots: Vec<usize>,
    pub(super) compute: DType,
    pub(super) device: Device,
}

/// What burn recorded of a block's forward. It holds views of the unit's weights, which burn gives
/// back in backward; those of a tape that is dropped instead may stay until burn's next backward.
pub struct Tape<B> {
    bound: Box<dyn Template<B>>,
    input: Option<Tensor<3>>,
    output: Tensor<3>,
}

impl<B> Block<B> {
    fn bind(&self, input: &Input<'_, Self>, tape: TapeMode) -> Box<dyn Template<B>> {
        let (slots, compute, device) = (&self.slots[..], self.compute, &self.device);
        self.template.bind(&Binding { weights: input.weights, slots, compute, device, tape })
    }

    /// For modules that draw from burn's own generator. It belongs to the process: with ranks as
    /// threads such draws do not repeat, and [`Context::random`] must be used instead.
    fn seed(&self, draw: Draw) {
        if let Some(seed) = draw.seed {
            self.device.seed(seed);
        }
    }
}

impl<B> Segment for Block<B> {
    type Batch = B;
    type Value = Tensor<3>;
    type Tape = Tape<B>;

    fn infer(&self, input: Input<'_, Self>) -> Tensor<3> {
        let training = input.draw.seed.is_some();
        self.seed(input.draw);
        // The recomputation must give the same bits, so training takes autodiff's kernels here
        // too; burn's dropout also acts only with autodiff on.
        let tape = if training { TapeMode::Untracked } else { TapeMode::Off };
        let bound = self.bind(&input, tape);
        let value = input.value.map(|value| if training { value.autodiff() } else { value });
        let context = Context { batch: input.batch, draw: input.draw };
        bound.run(&context, value).inner()
    }

    fn forward(&self, input: Input<'_, Self>) -> (Tensor<3>, Tape<B>) {
        self.seed(input.draw);
        let bound = self.bind(&input, TapeMode::Tracked);
        let value = input.value.map(|value| value.autodiff().require_grad());
        let context = Context { batch: input.batch, draw: input.draw };
        let output = bound.run(&context, value.clone());
        (output.clone().inner(), Tape { bound, input: value, output })
    }

    fn backward(
        &self,
        tape: Tape<B>,
        grad: OutputGrad<Tensor<3>>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<Tensor<3>>, EngineError> {
        let Tape { bound, input, output } = tape;
        if !output.is_tracked() {
            return Ok(None); // every parameter is frozen, and there is no input
        }
        // burn starts from ones of the root's shape, so this is the product with `grad`. A sum
        // before it would cost a pass, and its bits would depend on the number of threads.
        let root = match grad {
            OutputGrad::Value(grad) => output * grad,
            OutputGrad::Loss(LossScale::ONE) => output,
            OutputGrad::Loss(scale) => output * scale.get(),
        };
        let mut grads = root.backward();
        drop(root);
        bound.drain(&mut grads, &self.slots, sink)?;
        Ok(input.and_then(|input| input.grad_remove(&mut grads)))
    }
}

impl<B> std::fmt::Debug for Block<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Block({} uses, {})", self.slots.len(), self.compute)
    }
}

impl<B> std::fmt::Debug for Tape<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tape({:?})", self.output.dims())
    }
}
