//! The mean cross entropy of logits.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::tensor::{Int, Tensor};

use super::op::{Fused, Input, apply, floats, tensor};
use super::simd::{each_row, each_row2, exp, max_of, sum_of};

/// The mean over rows of `-log softmax(logits)[target]`, in nats; `logits` is `[rows, classes]`.
pub(crate) fn cross_entropy(logits: &Tensor<2>, targets: &Tensor<1, Int>) -> Option<Tensor<1>> {
    let logits = Input::new(logits)?;
    let targets = targets.to_data().iter::<i64>().map(|target| target as usize).collect();
    apply(CrossEntropy { targets }, [Some(logits)])
}

#[derive(Clone, Debug)]
struct CrossEntropy {
    targets: Arc<[usize]>,
}

impl Fused<1> for CrossEntropy {
    /// The softmax of the logits.
    type Saved = FlexTensor;

    fn forward(&self, [logits]: [FlexTensor; 1]) -> (FlexTensor, FlexTensor) {
        let [rows, classes] = logits.layout().shape().dims();
        let logits = floats(&logits);
        let mut probs = vec![0.0; rows * classes];
        let mut losses = vec![0.0; rows];
        each_row2([&mut probs, &mut losses], [classes, 1], |row, probs, loss| {
            let logits = &logits[row * classes..][..classes];
            let max = max_of(logits);
            for (prob, logit) in probs.iter_mut().zip(logits) {
                *prob = exp(logit - max);
            }
            let sum = sum_of(probs, probs, |a, _| a);
            let scale = 1.0 / sum;
            probs.iter_mut().for_each(|prob| *prob *= scale);
            loss[0] = sum.ln() - (logits[self.targets[row]] - max);
        });
        let mean = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / rows as f64;
        (tensor(vec![mean as f32], [1]), tensor(probs, [rows, classes]))
    }

    fn backward(&self, probs: FlexTensor, grad: FlexTensor) -> [FlexTensor; 1] {
        let [rows, classes] = probs.layout().shape().dims();
        let (probs, scale) = (floats(&probs), floats(&grad)[0] / rows as f32);
        let mut out = vec![0.0; rows * classes];
        each_row(&mut out, classes, |row, out| {
            for (out, prob) in out.iter_mut().zip(&probs[row * classes..][..classes]) {
                *out = prob * scale;
            }
            out[self.targets[row]] -= scale;
        });
        [tensor(out, [rows, classes])]
    }
}
