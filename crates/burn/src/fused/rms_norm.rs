//! RMSNorm (Zhang and Sennrich, 2019).

use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use super::op::{Fused, Input, apply, floats, tensor};
use super::simd::{each_row, each_row2, sum_of};

/// Each row of `[rows, width]` divided by its root mean square, times `weight` of `[width]`.
pub(crate) fn rms_norm(input: &Tensor<2>, weight: &Tensor<1>, epsilon: f64) -> Option<Tensor<2>> {
    let op = RmsNorm { epsilon: epsilon as f32 };
    apply(op, [Input::new(input), Input::new(weight)])
}

#[derive(Clone, Debug)]
struct RmsNorm {
    epsilon: f32,
}

#[derive(Clone, Debug)]
struct Saved {
    input: FlexTensor,
    weight: FlexTensor,
    /// One over the root mean square, a row.
    scales: Vec<f32>,
}

impl Fused<2> for RmsNorm {
    type Saved = Saved;

    fn forward(&self, [input, weight]: [FlexTensor; 2]) -> (FlexTensor, Saved) {
        let [rows, width] = input.layout().shape().dims();
        let (x, w) = (floats(&input), floats(&weight));
        let mut scales = vec![0.0; rows];
        let mut out = vec![0.0; rows * width];
        each_row2([&mut out, &mut scales], [width, 1], |row, out, scale| {
            let x = &x[row * width..][..width];
            let mean = sum_of(x, x, |a, b| a * b) / width as f32;
            scale[0] = 1.0 / (mean + self.epsilon).sqrt();
            for ((out, x), w) in out.iter_mut().zip(x).zip(w) {
                *out = x * scale[0] * w;
            }
        });
        let out = tensor(out, [rows, width]);
        (out, Saved { input, weight, scales })
    }

    fn backward(&self, saved: Saved, grad: FlexTensor) -> [FlexTensor; 2] {
        let Saved { input, weight, scales } = saved;
        let [rows, width] = input.layout().shape().dims();
        let (x, w, g) = (floats(&input), floats(&weight), floats(&grad));
        // With s the scale and x' = x s: d weight = sum over rows of g x', and
        // d x = s (g w - x' mean(g w x')).
        let mut grad_input = vec![0.0; rows * width];
        each_row(&mut grad_input, width, |row, out| {
            let (x, g) = (&x[row * width..][..width], &g[row * width..][..width]);
            let scale = scales[row];
            for ((out, g), w) in out.iter_mut().zip(g).zip(w) {
                *out = g * w;
            }
            let mean = sum_of(out, x, |a, b| a * b) * scale / width as f32;
            for (out, x) in out.iter_mut().zip(x) {
                *out = scale * (*out - x * scale * mean);
            }
        });
        let mut grad_weight = vec![0.0; width];
        each_row(&mut grad_weight, width, |_, out| {
            for (row, scale) in scales.iter().enumerate() {
                let (x, g) = (&x[row * width..][..width], &g[row * width..][..width]);
                for ((out, x), g) in out.iter_mut().zip(x).zip(g) {
                    *out += g * (x * scale);
                }
            }
        });
        [tensor(grad_input, [rows, width]), tensor(grad_weight, [width])]
    }
}
