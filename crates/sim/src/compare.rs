//! Whether two trainings are the same.

use oxizero_core::ParamSpec;

use crate::trial::Trained;

/// The largest differences of two trainings; infinite where only one is a number, or is there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Differences {
    /// Of an element of a gradient.
    pub grads: f64,
    /// Of a norm, relative to what it should be.
    pub norms: f64,
    /// Of a model weight.
    pub weights: f64,
    /// Of a master weight or an element of an optimizer state.
    pub states: f64,
}

impl Differences {
    /// How far `trained` is from what it should be.
    pub fn of(trained: &Trained, expected: &Trained) -> Self {
        let norm = |(norm, right): (&Option<f64>, &Option<f64>)| match (norm, right) {
            (Some(norm), Some(right)) => distance(*norm, *right) / right.max(f64::MIN_POSITIVE),
            (None, None) => 0.0,
            _ => f64::INFINITY,
        };
        let by_param = trained.grad_norms.iter().zip(&expected.grad_norms);
        let by_param = by_param.flat_map(|(a, b)| a.iter().zip(b)).map(norm);
        let norms = trained.outcomes.iter().zip(&expected.outcomes).map(norm).chain(by_param);
        let grads = READ.iter().flat_map(|(_, grads)| grads(trained).iter().zip(grads(expected)));
        let grads = grads.map(|(a, b)| farthest(a, b));
        let states = trained.states.iter().zip(&expected.states).map(|(a, b)| farthest(a, b));
        Self {
            grads: grads.fold(0.0, f64::max),
            norms: norms.fold(0.0, f64::max),
            weights: farthest(&trained.weights, &expected.weights),
            states: states.fold(0.0, f64::max),
        }
    }

    /// The larger of each.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            grads: self.grads.max(other.grads),
            norms: self.norms.max(other.norms),
            weights: self.weights.max(other.weights),
            states: self.states.max(other.states),
        }
    }
}

/// The ways in which gradients are read.
const READ: [(&str, GradsOf); 3] = [
    ("", |trained| &trained.grads),
    (", read with the model's", |trained| &trained.model_grads),
    (", read across the mesh", |trained| &trained.global_grads),
];
type GradsOf = fn(&Trained) -> &Vec<Vec<Vec<f32>>>;

fn farthest(values: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    let of_list = |(values, expected): (&Vec<f32>, &Vec<f32>)| {
        if values.len() != expected.len() {
            return f64::INFINITY;
        }
        let pairs = values.iter().zip(expected);
        pairs.map(|(a, b)| distance(f64::from(*a), f64::from(*b))).fold(0.0, f64::max)
    };
    values.iter().zip(expected).map(of_list).fold(0.0, f64::max)
}

fn distance(value: f64, right: f64) -> f64 {
    if value == right || (value.is_nan() && right.is_nan()) {
        return 0.0;
    }
    let distance = (value - right).abs();
    if distance.is_nan() { f64::INFINITY } else { distance }
}

/// Says where `trained` is not what it should be, if it is not; `specs` are the parameters.
///
/// Gradients, weights, states and loss scales are compared to the bit, but zeros of either sign are
/// equal, and so is whatever is not a number. Norms add in f64 in another order: they may differ by
/// 1e-12 of their size. Gradients that were not read are not compared.
pub fn first_difference(
    trained: &Trained,
    expected: &Trained,
    specs: &[ParamSpec],
) -> Option<String> {
    let (steps, right) = (trained.outcomes.len(), expected.outcomes.len());
    if steps != right {
        return Some(format!("there were {steps} steps, not {right}"));
    }
    for step in 0..steps {
        if let Some(why) = step_difference(trained, expected, step, specs) {
            return Some(format!("in step {step}, {why}"));
        }
    }
    if let Some(why) = difference(&trained.loss_scales, &expected.loss_scales) {
        return Some(format!("of the loss scales, {why}"));
    }
    for (param, (weights, right)) in trained.weights.iter().zip(&expected.weights).enumerate() {
        if let Some(why) = difference(weights, right) {
            return Some(format!("of weight `{}`, {why}", specs[param].name));
        }
    }
    for (param, (states, right)) in trained.states.iter().zip(&expected.states).enumerate() {
        let name = &specs[param].name;
        if states.len() != right.len() {
            return Some(format!("`{name}` has {} states, not {}", states.len(), right.len()));
        }
        for (state, (values, right)) in states.iter().zip(right).enumerate() {
            if let Some(why) = difference(values, right) {
                let state = ["master weight", "first state", "second state"][state];
                return Some(format!("of the {state} of `{name}`, {why}"));
            }
        }
    }
    None
}

/// Gradients come first: their difference says more than that of their norm.
fn step_difference(
    trained: &Trained,
    expected: &Trained,
    step: usize,
    specs: &[ParamSpec],
) -> Option<String> {
    for (read, grads) in READ {
        let empty = Vec::new();
        let [grads, right] = [trained, expected].map(|of| grads(of).get(step).unwrap_or(&empty));
        for (param, (grad, right)) in grads.iter().zip(right).enumerate() {
            if let Some(why) = difference(grad, right) {
                return Some(format!("of the gradient of `{}`{read}, {why}", specs[param].name));
            }
        }
    }
    let empty = Vec::new();
    let [norms, right] = [trained, expected].map(|of| of.grad_norms.get(step).unwrap_or(&empty));
    for (param, (norm, right)) in norms.iter().zip(right).enumerate() {
        let same = match (norm, right) {
            (Some(norm), Some(right)) => same_norm(*norm, *right),
            (norm, right) => norm == right,
        };
        if !same {
            let name = &specs[param].name;
            return Some(format!(
                "the norm of the gradient of `{name}` is {norm:?}, not {right:?}"
            ));
        }
    }
    match (trained.outcomes[step], expected.outcomes[step]) {
        (Some(norm), Some(right)) if same_norm(norm, right) => None,
        (Some(norm), Some(right)) => Some(format!("the norm is {norm:e}, not {right:e}")),
        (None, None) => None,
        (None, Some(_)) => Some("nothing was applied".into()),
        (Some(_), None) => Some("gradients that are not finite were applied".into()),
    }
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
    use oxizero_core::{DType, UnitId};

    use super::*;

    fn trained(norm: f64, grad: f32, loss_scale: f32, weight: f32) -> Trained {
        Trained {
            outcomes: vec![Some(norm)],
            grads: vec![vec![vec![grad]]],
            model_grads: vec![vec![vec![2.0]]],
            global_grads: vec![vec![vec![2.0]]],
            grad_norms: vec![vec![Some(2.0)]],
            loss_scales: vec![loss_scale],
            weights: vec![vec![0.5, weight]],
            states: vec![vec![vec![5.0]]],
        }
    }

    #[test]
    fn every_difference_is_named() {
        let right = trained(1.0, 2.0, 3.0, 4.0);
        let specs = [ParamSpec::new("w", &[2], DType::F32, UnitId(0))];
        assert_eq!(first_difference(&right, &right, &specs), None);
        assert_eq!(Differences::of(&right, &right), Differences::default());
        let of = |grad| vec![vec![vec![grad]]];
        for (wrong, named) in [
            (trained(1.0 + 1e-11, 2.0, 3.0, 4.0), "norm"),
            (trained(f64::NAN, 2.0, 3.0, 4.0), "norm"),
            (trained(1.0, 2.000_000_2, 3.0, 4.0), "gradient of `w`"),
            (trained(1.0, 2.0, 6.0, 4.0), "loss scales"),
            (trained(1.0, 2.0, 3.0, f32::NAN), "weight `w`, element 1"),
            (Trained { outcomes: vec![None], ..right.clone() }, "step 0"),
            (Trained { model_grads: of(1.0), ..right.clone() }, "with the model's, element 0"),
            (Trained { global_grads: of(1.0), ..right.clone() }, "across the mesh, element 0"),
            (Trained { grad_norms: vec![vec![None]], ..right.clone() }, "norm of the gradient of"),
            (Trained { states: vec![vec![vec![6.0]]], ..right.clone() }, "master weight of `w`"),
            (Trained { outcomes: vec![], ..right.clone() }, "0 steps"),
        ] {
            let difference = first_difference(&wrong, &right, &specs).expect("they differ");
            assert!(difference.contains(named), "{difference}");
        }
    }

    #[test]
    fn the_largest_differences_are_told() {
        let right = trained(2.0, 2.0, 3.0, 4.0);
        let mut wrong = trained(3.0, 2.5, 3.0, f32::NAN);
        wrong.states[0][0][0] = 4.0;
        let expected = Differences { grads: 0.5, norms: 0.5, weights: f64::INFINITY, states: 1.0 };
        assert_eq!(Differences::of(&wrong, &right), expected);
    }
}
