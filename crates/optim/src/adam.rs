//! Adam ("Adam: a method for stochastic optimization", Kingma and Ba).

use crate::moments::{MomentOptions, Moments, STATE_NAMES};
use crate::pass::update_each;
use crate::tiny::{TINY, zero_below};
use crate::{Gradient, Hyper, OptimError, Optimizer, Weights};

/// Adam, as `torch.optim.Adam`: weight decay is an L2 penalty, whose gradient is added to the
/// loss's.
///
/// In update number `t`, with gradient `g`, weight `p` and moments `m` (`exp_avg`) and `v`
/// (`exp_avg_sq`):
///
/// ```text
/// g = g + weight_decay * p
/// m = m + (1 - beta1) * (g - m)            where beta1 > 0.5, else m = g - (g - m) * beta1
/// v = v * beta2 + ((1 - beta2) * g) * g
/// p = p - ((lr / (1 - beta1^t)) * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    options: MomentOptions,
}

impl Adam {
    /// Refuses a beta outside [0, 1) and an `eps` that is not a positive normal f32.
    pub fn new(options: MomentOptions) -> Result<Self, OptimError> {
        options.validate().map(|options| Self { options })
    }
}

impl Optimizer for Adam {
    fn description(&self) -> String {
        format!("Adam with {}", self.options)
    }

    fn state_names(&self) -> &'static [&'static str] {
        STATE_NAMES
    }

    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>) {
        let moments = Moments::at(self.options, hyper.lr, step);
        let penalty = hyper.weight_decay as f32;
        update_each(
            grad,
            weights,
            #[inline(always)]
            |grad, weight, [first, second]| {
                let grad = zero_below(TINY, grad + penalty * weight);
                let (step, moments) = moments.advance(grad, [first, second]);
                (weight - step, moments)
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::moments::tests::{any_options, reference};
    use crate::reference::{Case, any_case, config, flush};

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn blocks_follow_the_formula_bit_by_bit(case in any_case(), options in any_options()) {
            let optimizer = Adam::new(options).unwrap();
            case.assert_follows(&optimizer, |hyper: Hyper, step, (g, p), states| {
                let g = flush(2.0_f32.powi(-100), g + hyper.weight_decay as f32 * p);
                reference(options, hyper, step, (g, p), states)
            });
        }
    }

    #[test]
    fn weight_decay_is_a_gradient() {
        let case = |weight_decay, grad: &[f32]| Case {
            hyper: Hyper { lr: 0.1, weight_decay },
            ..Case::of(&[2.0], &[grad])
        };
        let optimizer = Adam::new(MomentOptions::default()).unwrap();
        let decayed = case(0.25, &[0.5]).run(&optimizer);
        assert_eq!(decayed, case(0.0, &[1.0]).run(&optimizer));
    }
}
