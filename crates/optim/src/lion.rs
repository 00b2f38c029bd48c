//! Lion ("Symbolic discovery of optimization algorithms", Chen et al., algorithm 2).

use crate::error::check;
use crate::pass::update_each;
use crate::tiny::{TINY, zero_below};
use crate::{Gradient, Hyper, OptimError, Optimizer, Weights};

/// The options of [`Lion`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionOptions {
    /// The weight of the average in the direction of a step; in [0, 1).
    pub beta1: f64,
    /// The decay of the average of gradients; in [0, 1).
    pub beta2: f64,
}

impl Default for LionOptions {
    /// The paper's: 0.9 and 0.99.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.99 }
    }
}

/// Lion: every element moves by the learning rate, in the direction of an average of gradients;
/// weight decay shrinks the weight and leaves the average alone.
///
/// In an update with gradient `g`, weight `p` and average `m` (`exp_avg`):
///
/// ```text
/// c = m * beta1 + (1 - beta1) * g
/// p = p * (1 - lr * weight_decay) - lr * sign(c)
/// m = m * beta2 + (1 - beta2) * g
/// ```
///
/// The sign of 0 is 0, as in the paper: an element that never had a gradient does not move.
/// (DeepSpeed's kernels move it by the learning rate.)
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    options: LionOptions,
}

impl Lion {
    /// Refuses a beta outside [0, 1).
    pub fn new(options: LionOptions) -> Result<Self, OptimError> {
        for (field, beta) in [("beta1", options.beta1), ("beta2", options.beta2)] {
            check(field, beta, (0.0..1.0).contains(&beta), "0 <= beta < 1")?;
        }
        Ok(Self { options })
    }
}

impl Optimizer for Lion {
    fn description(&self) -> String {
        let LionOptions { beta1, beta2 } = self.options;
        format!("Lion with betas {beta1:?} and {beta2:?}")
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>) {
        assert!(step > 0, "updates are counted from 1");
        let LionOptions { beta1, beta2 } = self.options;
        let [of_direction, of_average] =
            [beta1, beta2].map(|beta| (beta as f32, (1.0 - beta) as f32));
        let lr = hyper.lr as f32;
        let shrink = (1.0 - hyper.lr * hyper.weight_decay) as f32;
        update_each(
            grad,
            weights,
            #[inline(always)]
            |grad, weight, [average]| {
                let direction = sign(mix(of_direction, average, grad));
                let average = zero_below(TINY, mix(of_average, average, grad));
                (weight * shrink - lr * direction, [average])
            },
        );
    }
}

#[inline(always)]
fn mix((old, new): (f32, f32), average: f32, grad: f32) -> f32 {
    average * old + new * grad
}

/// -1, 0 or 1; of a NaN, a NaN.
#[inline(always)]
fn sign(value: f32) -> f32 {
    if value == 0.0 { 0.0 } else { value.signum() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::reference::{Case, any_case, config, flush};

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn blocks_follow_the_formula_bit_by_bit(
            case in any_case(),
            beta1 in prop_oneof![0.0..1.0, Just(0.9), Just(0.0)],
            beta2 in prop_oneof![0.0..1.0, Just(0.99), Just(0.0)],
        ) {
            let optimizer = Lion::new(LionOptions { beta1, beta2 }).unwrap();
            case.assert_follows(&optimizer, |hyper: Hyper, _, (g, p), [m]| {
                let c = m * beta1 as f32 + (1.0 - beta1) as f32 * g;
                let direction = match c.partial_cmp(&0.0) {
                    Some(order) => f32::from(order as i8),
                    None => f32::NAN,
                };
                let p = p * (1.0 - hyper.lr * hyper.weight_decay) as f32
                    - hyper.lr as f32 * direction;
                (p, [flush(2.0_f32.powi(-100), m * beta2 as f32 + (1.0 - beta2) as f32 * g)])
            });
        }
    }

    /// Two steps by hand; all numbers are exact.
    #[test]
    fn a_step_is_the_learning_rate_in_the_direction_of_the_average() {
        let case = Case {
            hyper: Hyper { lr: 0.5, weight_decay: 0.0 },
            ..Case::of(&[0.0, 0.0, 4.0], &[&[8.0, 0.0, -1.0], &[-4.0, 0.0, -2.0]])
        };
        let optimizer = Lion::new(LionOptions { beta1: 0.75, beta2: 0.5 }).unwrap();
        let after = case.run(&optimizer);
        // The first element's second direction: 0.75 * 4 - 0.25 * 4 > 0.
        assert_eq!(after.master, [-0.5 - 0.5, 0.0, 4.0 + 0.5 + 0.5]);
        assert_eq!(after.states, [[0.0, 0.0, -1.25]]);
    }

    #[test]
    fn weight_decay_leaves_the_average_alone() {
        let case = |weight_decay| Case {
            hyper: Hyper { lr: 0.5, weight_decay },
            ..Case::of(&[2.0, 2.0], &[&[1.0, 0.0]])
        };
        let optimizer = Lion::new(LionOptions::default()).unwrap();
        let [plain, decayed] = [0.0, 0.5].map(|decay| case(decay).run(&optimizer));
        assert_eq!(plain.states, decayed.states);
        assert_eq!((plain.master, decayed.master), (vec![1.5, 2.0], vec![1.0, 1.5]));
    }

    #[test]
    fn a_beta_out_of_range_is_refused_by_name() {
        let options = LionOptions::default();
        for beta in [-0.1, 1.0, f64::NAN] {
            let refuse = |options| Lion::new(options).unwrap_err().to_string();
            assert!(refuse(LionOptions { beta1: beta, ..options }).starts_with("`beta1 = "));
            assert!(refuse(LionOptions { beta2: beta, ..options }).starts_with("`beta2 = "));
        }
    }
}
