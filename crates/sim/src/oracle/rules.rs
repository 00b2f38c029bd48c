//! How gradients change weights.

use super::{Param, Rule, State};
use crate::round;

impl State {
    /// Updates the parameter by the gradients of its elements, each multiplied by `factor`.
    pub(super) fn update(
        &mut self,
        (rule, param): (Rule, &Param),
        grads: &[f32],
        factor: f32,
        lr_factor: f64,
    ) {
        self.updates += 1;
        let (lr, decay, step) = (param.lr * lr_factor, param.weight_decay, self.updates as i32);
        for (element, grad) in grads.iter().enumerate() {
            let grad = flush(grad * factor, GRAD_MIN);
            let weight = &mut self.master[element];
            let (first, second) = (&mut self.first[element], &mut self.second[element]);
            match rule {
                Rule::AdamW { beta1, beta2, eps } => {
                    *weight *= (1.0 - lr * decay) as f32;
                    *weight -= adam(grad, first, second, [beta1, beta2, eps, lr], step);
                }
                Rule::Adam { beta1, beta2, eps } => {
                    let grad = flush(grad + decay as f32 * *weight, GRAD_MIN);
                    *weight -= adam(grad, first, second, [beta1, beta2, eps, lr], step);
                }
                Rule::Lion { beta1, beta2 } => {
                    let [direction, average] = [beta1, beta2]
                        .map(|beta| *first * beta as f32 + grad * (1.0 - beta) as f32);
                    let sign = f32::from(i8::from(direction > 0.0) - i8::from(direction < 0.0));
                    *weight = *weight * (1.0 - lr * decay) as f32 - lr as f32 * sign;
                    *first = flush(average, GRAD_MIN);
                }
                Rule::Adagrad { eps } => {
                    let grad = flush(grad + decay as f32 * *weight, GRAD_MIN);
                    *first += flush(grad, ROOT_MIN).powi(2);
                    *weight -= lr as f32 * grad / (first.sqrt() + eps as f32);
                }
                Rule::Sgd { momentum } => {
                    let grad = flush(grad + decay as f32 * *weight, GRAD_MIN);
                    *first = flush(momentum as f32 * *first + grad, GRAD_MIN);
                    *weight -= lr as f32 * *first;
                }
            }
            self.model[element] = round(*weight, param.model);
        }
    }
}

/// 2^-100: a gradient or first moment that is smaller counts as zero.
const GRAD_MIN: f32 = 1.0 / ((1_u128 << 100) as f32);
/// 2^-58: the square of a gradient that is smaller counts as zero.
const ROOT_MIN: f32 = 1.0 / ((1_u64 << 58) as f32);

/// What Adam and AdamW subtract (Kingma and Ba, 2015, algorithm 1, in the order of `torch.optim`).
fn adam(
    grad: f32,
    first: &mut f32,
    second: &mut f32,
    [beta1, beta2, eps, lr]: [f64; 4],
    step: i32,
) -> f32 {
    let new_part = (1.0 - beta1) as f32;
    let moved = if new_part < 0.5 {
        *first + new_part * (grad - *first)
    } else {
        grad - (grad - *first) * (1.0 - new_part)
    };
    *first = flush(moved, GRAD_MIN);
    let root = flush(grad, ROOT_MIN);
    *second = flush(*second * beta2 as f32 + (1.0 - beta2) as f32 * root * root, f32::MIN_POSITIVE);
    let (corrected1, corrected2) = (1.0 - beta1.powi(step), 1.0 - beta2.powi(step));
    let denominator = second.sqrt() / corrected2.sqrt() as f32 + eps as f32;
    (lr / corrected1) as f32 * *first / denominator
}

/// Zero where `value` is smaller than `least`.
fn flush(value: f32, least: f32) -> f32 {
    if value.abs() < least { 0.0 } else { value }
}
