//! Attention's softmax.

use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use super::op::{Fused, Input, apply, floats, tensor};
use super::simd::{each_row, exp, max_of, sum_of};

/// The softmax of each row of `[.., positions, positions]` over the positions up to its own; the
/// weights of later ones are 0.
pub(crate) fn causal_softmax(scores: &Tensor<4>) -> Option<Tensor<4>> {
    apply(CausalSoftmax, [Input::new(scores)])
}

#[derive(Clone, Debug)]
struct CausalSoftmax;

impl Fused<1> for CausalSoftmax {
    /// The output.
    type Saved = FlexTensor;

    fn forward(&self, [scores]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let shape = scores.layout().shape().clone();
        let [_, _, _, positions] = shape.dims();
        let scores = floats(&scores);
        let mut out = vec![0.0; scores.len()];
        each_row(&mut out, positions, |row, out| {
            let seen = row % positions + 1;
            let scores = &scores[row * positions..][..seen];
            let out = &mut out[..seen];
            let max = max_of(scores);
            for (out, score) in out.iter_mut().zip(scores) {
                *out = exp(score - max);
            }
            let scale = 1.0 / sum_of(out, out, |a, _| a);
            out.iter_mut().for_each(|out| *out *= scale);
        });
        let out = tensor(out, shape);
        (out.clone(), out)
    }

    fn backward(&self, weights: FlexTensor, grad: FlexTensor) -> [FlexTensor; 1] {
        let shape = weights.layout().shape().clone();
        let [_, _, _, positions] = shape.dims();
        let (weights, grad) = (floats(&weights), floats(&grad));
        let mut out = vec![0.0; weights.len()];
        each_row(&mut out, positions, |row, out| {
            let seen = row % positions + 1;
            let weights = &weights[row * positions..][..seen];
            let grad = &grad[row * positions..][..seen];
            let dot = sum_of(weights, grad, |a, b| a * b);
            for ((out, weight), grad) in out.iter_mut().zip(weights).zip(grad) {
                *out = weight * (grad - dot);
            }
        });
        [tensor(out, shape)]
    }
}
