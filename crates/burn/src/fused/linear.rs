//! A matrix product with a weight of `[outputs, inputs]`.

use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::Tensor;

use super::op::{Fused, Input, apply};

/// `input` of `[rows, inputs]` times the transpose of `weight`. Unlike burn's product with a
/// transposed weight, its gradient of the weight comes out in the weight's own order.
pub(crate) fn linear(input: &Tensor<2>, weight: &Tensor<2>) -> Option<Tensor<2>> {
    apply(Linear, [Input::new(input), Input::new(weight)])
}

#[derive(Clone, Debug)]
struct Linear;

impl Fused<2> for Linear {
    type Saved = [FlexTensor; 2];

    fn forward(&self, inputs: [FlexTensor; 2]) -> (FlexTensor, [FlexTensor; 2]) {
        let [input, weight] = inputs.clone();
        (Flex::float_matmul(input, weight.transpose(0, 1)), inputs)
    }

    fn backward(&self, [input, weight]: [FlexTensor; 2], grad: FlexTensor) -> [FlexTensor; 2] {
        let grad_input = Flex::float_matmul(grad.clone(), weight);
        [grad_input, Flex::float_matmul(grad.transpose(0, 1), input)]
    }
}
