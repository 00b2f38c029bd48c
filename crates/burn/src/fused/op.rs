//! Operations with a backward of their own, put into burn's graph.

use std::fmt::Debug;
use std::marker::PhantomData;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Shape, Tensor};

/// An operation on contiguous f32 tensors in host memory.
pub(super) trait Fused<const N: usize>: Clone + Debug + Send + 'static {
    /// What backward needs.
    type Saved: Clone + Debug + Send + 'static;

    /// The output, and what backward needs.
    fn forward(&self, inputs: [FlexTensor; N]) -> (FlexTensor, Self::Saved);

    /// The gradient of each input, from that of the output.
    fn backward(&self, saved: Self::Saved, grad: FlexTensor) -> [FlexTensor; N];
}

/// A tensor with a place in burn's graph.
type Taped = FloatTensor<Autodiff<Flex>>;

/// A tensor that a fused operation can take, whatever its rank.
#[derive(Clone, Debug)]
pub(super) enum Input {
    Plain(FlexTensor),
    Taped(Taped),
}

impl Input {
    /// `None` for tensors that are not f32, or elsewhere than in host memory.
    pub(super) fn new<const D: usize>(tensor: &Tensor<D>) -> Option<Self> {
        if tensor.dtype() != DType::F32 {
            return None;
        }
        match tensor.clone().try_into_primitive::<Flex>() {
            Ok(tensor) => Some(Self::Plain(tensor)),
            Err(_) => tensor.clone().try_into_primitive::<Autodiff<Flex>>().ok().map(Self::Taped),
        }
    }
}

/// Runs `op`, recorded for backward where an input is. `None` where it cannot be run.
pub(super) fn apply<const N: usize, const D: usize, F: Fused<N>>(
    op: F,
    inputs: [Option<Input>; N],
) -> Option<Tensor<D>> {
    let mut plain = Vec::with_capacity(N);
    let mut taped = Vec::with_capacity(N);
    for input in inputs {
        match input? {
            Input::Plain(tensor) => plain.push(tensor),
            Input::Taped(tensor) => taped.push(tensor),
        }
    }
    if let Ok(inputs) = <[FlexTensor; N]>::try_from(plain) {
        let (output, _) = op.forward(inputs.map(contiguous));
        return Some(Tensor::from_primitive::<Flex>(output));
    }
    // A mixture of plain and recorded tensors is left to burn.
    let inputs = <[Taped; N]>::try_from(taped).ok()?;
    let nodes = inputs.each_ref().map(Taped::node);
    let inputs = inputs.map(|input| contiguous(input.into_primitive()));
    let step = Step::<F>(PhantomData);
    let output = match step.prepare::<NoCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => {
            let (output, saved) = op.forward(inputs);
            prepared.finish((op, saved), output)
        }
        OpsKind::UnTracked(prepared) => prepared.finish(op.forward(inputs).0),
    };
    Some(Tensor::from_primitive::<Autodiff<Flex>>(output))
}

/// The elements of a contiguous tensor.
pub(super) fn floats(tensor: &FlexTensor) -> &[f32] {
    tensor.as_slice().expect("inputs were made contiguous")
}

/// A tensor of these elements.
pub(super) fn tensor(values: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(burn::tensor::TensorData::new(values, shape.into()))
}

fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

#[derive(Debug)]
struct Step<F>(PhantomData<fn() -> F>);

impl<const N: usize, F: Fused<N>> Backward<Flex, N> for Step<F> {
    type State = (F, F::Saved);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = contiguous(grads.consume::<Flex>(&ops.node));
        let (op, saved) = ops.state;
        for (parent, grad) in ops.parents.into_iter().zip(op.backward(saved, grad)) {
            if let Some(parent) = parent {
                grads.register::<Flex>(parent.id, grad);
            }
        }
    }
}
