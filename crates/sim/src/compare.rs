//! Whether two trainings are the same.

use crate::trial::Trained;

/// Says where `trained` is not what it should be, if it is not.
///
/// Gradients, weights and loss scales are compared to the bit, but zeros of either sign are equal,
/// and so is whatever is not a number. Norms add in f64 in another order: they may differ by 1e-12
/// of their size. Gradients that were not read are not compared.
pub fn first_difference(trained: &Trained, expected: &Trained) -> Option<String> {
    let (steps, right) = (trained.outcomes.len(), expected.outcomes.len());
    if steps != right {
        return Some(format!("there were {steps} steps, not {right}"));
    }
    for (step, (norm, right)) in trained.outcomes.iter().zip(&expected.outcomes).enumerate() {
        let same = match (norm, right) {
            (Some(norm), Some(right)) => same_norm(*norm, *right),
            _ => norm == right,
        };
        if !same {
            return Some(format!("step {step} ended with norm {norm:?}, not {right:?}"));
        }
    }
    for (step, (grads, right)) in trained.grads.iter().zip(&expected.grads).enumerate() {
        for (param, (grad, right)) in grads.iter().zip(right).enumerate() {
            if let Some(why) = difference(grad, right) {
                return Some(format!("in step {step}, of gradient {param}, {why}"));
            }
        }
    }
    if let Some(why) = difference(&trained.loss_scales, &expected.loss_scales) {
        return Some(format!("of the loss scales, {why}"));
    }
    for (param, (weights, right)) in trained.weights.iter().zip(&expected.weights).enumerate() {
        if let Some(why) = difference(weights, right) {
            return Some(format!("of weight {param}, {why}"));
        }
    }
    None
}

fn same_norm(norm: f64, right: f64) -> bool {
    (norm.is_nan() && right.is_nan()) || norm == right || (norm - right).abs() <= 1e-12 * right
}

fn difference(values: &[f32], expected: &[f32]) -> Option<String> {
    if values.len() != expected.len() {
        return Some(format!("there are {} elements, not {}", values.len(), expected.len()));
    }
    let same = |value: f32, right: f32| value == right || (value.is_nan() && right.is_nan());
    let mut pairs = values.iter().zip(expected);
    let at = pairs.position(|(value, right)| !same(*value, *right))?;
    Some(format!("element {at} is {:e}, not {:e}", values[at], expected[at]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trained(norm: f64, grad: f32, loss_scale: f32, weight: f32) -> Trained {
        Trained {
            outcomes: vec![Some(norm)],
            grads: vec![vec![vec![grad]]],
            loss_scales: vec![loss_scale],
            weights: vec![vec![0.5, weight]],
        }
    }

    #[test]
    fn every_difference_is_named() {
        let right = trained(1.0, 2.0, 3.0, 4.0);
        assert_eq!(first_difference(&right, &right), None);
        for (wrong, named) in [
            (trained(1.0 + 1e-11, 2.0, 3.0, 4.0), "norm"),
            (trained(f64::NAN, 2.0, 3.0, 4.0), "norm"),
            (trained(1.0, 2.000_000_2, 3.0, 4.0), "gradient 0"),
            (trained(1.0, 2.0, 6.0, 4.0), "loss scales"),
            (trained(1.0, 2.0, 3.0, f32::NAN), "weight 0, element 1"),
            (Trained { outcomes: vec![None], ..right.clone() }, "step 0"),
            (Trained { outcomes: vec![], ..right.clone() }, "0 steps"),
        ] {
            let difference = first_difference(&wrong, &right).expect("they differ");
            assert!(difference.contains(named), "{difference}");
        }
    }
}
