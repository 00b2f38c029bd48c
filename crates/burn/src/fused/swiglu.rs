//! SwiGLU's gate (Shazeer, 2020).

use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use super::op::{Fused, Input, apply, floats, tensor};
use super::simd::{each_row, each_row2, exp};

/// `silu(gate) * up`, element by element, of `[rows, width]`.
pub(crate) fn swiglu(gate: &Tensor<2>, up: &Tensor<2>) -> Option<Tensor<2>> {
    apply(SwiGlu, [Input::new(gate), Input::new(up)])
}

#[derive(Clone, Debug)]
struct SwiGlu;

impl Fused<2> for SwiGlu {
    type Saved = [FlexTensor; 2];

    fn forward(&self, inputs: [FlexTensor; 2]) -> (FlexTensor, [FlexTensor; 2]) {
        let [rows, width] = inputs[0].layout().shape().dims();
        let [gate, up] = inputs.each_ref().map(floats);
        let mut out = vec![0.0; rows * width];
        each_row(&mut out, width, |row, out| {
            let (gate, up) = (&gate[row * width..][..width], &up[row * width..][..width]);
            for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                *out = gate * sigmoid(*gate) * up;
            }
        });
        (tensor(out, [rows, width]), inputs)
    }

    fn backward(&self, saved: [FlexTensor; 2], grad: FlexTensor) -> [FlexTensor; 2] {
        let [rows, width] = grad.layout().shape().dims();
        let ([gate, up], grad) = (saved.each_ref().map(floats), floats(&grad));
        let mut grad_gate = vec![0.0; rows * width];
        let mut grad_up = vec![0.0; rows * width];
        each_row2([&mut grad_gate, &mut grad_up], [width; 2], |row, grad_gate, grad_up| {
            let row = row * width..(row + 1) * width;
            let inputs = gate[row.clone()].iter().zip(&up[row.clone()]).zip(&grad[row]);
            let outputs = grad_gate.iter_mut().zip(grad_up);
            for ((grad_gate, grad_up), ((gate, up), grad)) in outputs.zip(inputs) {
                let sigmoid = sigmoid(*gate);
                *grad_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid));
                *grad_up = grad * gate * sigmoid;
            }
        });
        [tensor(grad_gate, [rows, width]), tensor(grad_up, [rows, width])]
    }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}
