//! Adagrad ("Adaptive subgradient methods", Duchi, Hazan and Singer).

use crate::error::{check, check_eps};
use crate::pass::update_each;
use crate::tiny::{TINY, TINY_ROOT, zero_below};
use crate::{Gradient, Hyper, OptimError, Optimizer, Weights};

/// The options of [`Adagrad`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdagradOptions {
    /// How fast the learning rate falls; 0 or more.
    pub lr_decay: f64,
    /// What the sums of squares start from: 0, or a positive normal f32.
    pub initial_sum: f32,
    /// What is added to the root of the sum; a positive normal f32.
    pub eps: f64,
}

impl Default for AdagradOptions {
    /// The defaults of `torch.optim`: 0, 0 and 1e-10.
    fn default() -> Self {
        Self { lr_decay: 0.0, initial_sum: 0.0, eps: 1e-10 }
    }
}

/// Adagrad, as `torch.optim.Adagrad`; weight decay is an L2 penalty.
///
/// In update number `t`, with gradient `g`, weight `p` and sum of squares `s` (`sum`):
///
/// ```text
/// g = g + weight_decay * p
/// s = s + g * g
/// p = p - ((lr / (1 + (t - 1) * lr_decay)) * g) / (sqrt(s) + eps)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    options: AdagradOptions,
}

impl Adagrad {
    /// Refuses a negative `lr_decay`, an `initial_sum` that is neither 0 nor a positive normal
    /// f32, and an `eps` that is not a positive normal f32.
    pub fn new(options: AdagradOptions) -> Result<Self, OptimError> {
        let AdagradOptions { lr_decay, initial_sum, eps } = options;
        let not_negative = lr_decay >= 0.0 && lr_decay.is_finite();
        check("lr_decay", lr_decay, not_negative, "a number, 0 or more")?;
        let is_sum = initial_sum == 0.0 || (initial_sum > 0.0 && initial_sum.is_normal());
        let allowed = "0, or a positive number that is normal in f32";
        check("initial_accumulator_value", initial_sum.into(), is_sum, allowed)?;
        check_eps(eps)?;
        Ok(Self { options })
    }
}

impl Optimizer for Adagrad {
    fn description(&self) -> String {
        let AdagradOptions { lr_decay, initial_sum, eps } = self.options;
        format!("Adagrad with lr decay {lr_decay:?}, sums from {initial_sum:?}, eps {eps:?}")
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["sum"]
    }

    fn initial_state(&self) -> f32 {
        self.options.initial_sum
    }

    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>) {
        assert!(step > 0, "updates are counted from 1");
        let AdagradOptions { lr_decay, eps, .. } = self.options;
        let lr = (hyper.lr / (1.0 + (step - 1) as f64 * lr_decay)) as f32;
        let (penalty, eps) = (hyper.weight_decay as f32, eps as f32);
        update_each(
            grad,
            weights,
            #[inline(always)]
            |grad, weight, [sum]| {
                let grad = zero_below(TINY, grad + penalty * weight);
                let root = zero_below(TINY_ROOT, grad);
                let sum = sum + root * root;
                (weight - lr * grad / (sum.sqrt() + eps), [sum])
            },
        );
    }
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
            lr_decay in prop_oneof![Just(0.0), 0.0..1.0],
            initial_sum in prop_oneof![Just(0.0_f32), 0.01..2.0_f32],
            eps in prop::sample::select(vec![1e-10, 1e-15, 1e-3]),
        ) {
            let optimizer = Adagrad::new(AdagradOptions { lr_decay, initial_sum, eps }).unwrap();
            case.assert_follows(&optimizer, |hyper: Hyper, t, (g, p), [s]| {
                let g = flush(2.0_f32.powi(-100), g + hyper.weight_decay as f32 * p);
                let root = flush(2.0_f32.powi(-58), g);
                let s = s + root * root;
                let lr = (hyper.lr / (1.0 + (t as f64 - 1.0) * lr_decay)) as f32;
                (p - lr * g / (s.sqrt() + eps as f32), [s])
            });
        }
    }

    /// Two steps by hand; all numbers are exact but for an eps that rounding swallows.
    #[test]
    fn steps_shrink_as_squares_add_up_and_as_lr_decay_says() {
        let case = Case {
            hyper: Hyper { lr: 1.0, weight_decay: 0.0 },
            ..Case::of(&[8.0, 8.0], &[&[3.0, 0.0], &[4.0, 0.0]])
        };
        let options = AdagradOptions { initial_sum: 0.0, lr_decay: 1.0, ..Default::default() };
        let after = case.run(&Adagrad::new(options).unwrap());
        assert_eq!(after.master, [8.0 - 1.0 - 0.5 * 4.0 / 5.0, 8.0]);
        assert_eq!(after.states, [[25.0, 0.0]]);
        let options = AdagradOptions { initial_sum: 16.0, ..Default::default() };
        let after = case.run(&Adagrad::new(options).unwrap());
        assert_eq!(after.states, [[16.0 + 25.0, 16.0]]);
    }

    #[test]
    fn weight_decay_is_a_gradient() {
        let case = |weight_decay, grad: &[f32]| Case {
            hyper: Hyper { lr: 0.1, weight_decay },
            ..Case::of(&[2.0], &[grad])
        };
        let optimizer = Adagrad::new(AdagradOptions::default()).unwrap();
        assert_eq!(case(0.25, &[0.5]).run(&optimizer), case(0.0, &[1.0]).run(&optimizer));
    }

    #[test]
    fn options_out_of_range_are_refused_by_name() {
        let options = AdagradOptions::default();
        let refuse = |options| Adagrad::new(options).unwrap_err().to_string();
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(refuse(AdagradOptions { lr_decay: bad, ..options }).starts_with("`lr_decay"));
            assert!(refuse(AdagradOptions { eps: bad, ..options }).starts_with("`eps = "));
            let refused = refuse(AdagradOptions { initial_sum: bad as f32, ..options });
            assert!(refused.starts_with("`initial_accumulator_value = "), "{refused}");
        }
        assert!(refuse(AdagradOptions { eps: 0.0, ..options }).starts_with("`eps = "));
    }
}
