//! AdamW ("Decoupled weight decay regularization", Loshchilov and Hutter).

use crate::moments::{MomentOptions, Moments, STATE_NAMES};
use crate::pass::update_each;
use crate::{Gradient, Hyper, OptimError, Optimizer, Weights};

/// AdamW, as `torch.optim.AdamW`: Adam, whose weight decay shrinks the weight and leaves the
/// moments alone.
///
/// In update number `t`, with gradient `g`, weight `p` and moments `m` (`exp_avg`) and `v`
/// (`exp_avg_sq`):
///
/// ```text
/// p = p * (1 - lr * weight_decay)
/// m = m + (1 - beta1) * (g - m)            where beta1 > 0.5, else m = g - (g - m) * beta1
/// v = v * beta2 + ((1 - beta2) * g) * g
/// p = p - ((lr / (1 - beta1^t)) * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    options: MomentOptions,
}

impl AdamW {
    /// Refuses a beta outside [0, 1) and an `eps` that is not a positive normal f32.
    pub fn new(options: MomentOptions) -> Result<Self, OptimError> {
        options.validate().map(|options| Self { options })
    }
}

impl Optimizer for AdamW {
    fn description(&self) -> String {
        format!("AdamW with {}", self.options)
    }

    fn state_names(&self) -> &'static [&'static str] {
        STATE_NAMES
    }

    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>) {
        let moments = Moments::at(self.options, hyper.lr, step);
        let shrink = (1.0 - hyper.lr * hyper.weight_decay) as f32;
        update_each(
            grad,
            weights,
            #[inline(always)]
            |grad, weight, [first, second]| {
                let (step, moments) = moments.advance(grad, [first, second]);
                (weight * shrink - step, moments)
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::moments::tests::{any_options, reference};
    use crate::reference::{Case, any_case, config};

    proptest! {
        #![proptest_config(config())]

        #[test]
        fn blocks_follow_the_formula_bit_by_bit(case in any_case(), options in any_options()) {
            let optimizer = AdamW::new(options).unwrap();
            case.assert_follows(&optimizer, |hyper: Hyper, step, (g, p), states| {
                let p = p * (1.0 - hyper.lr * hyper.weight_decay) as f32;
                reference(options, hyper, step, (g, p), states)
            });
        }
    }

    #[test]
    fn weight_decay_leaves_the_moments_alone() {
        let case = |weight_decay| Case {
            hyper: Hyper { lr: 0.1, weight_decay },
            ..Case::of(&[1.0, 1.0], &[&[0.25, 0.0]])
        };
        let optimizer = AdamW::new(MomentOptions::default()).unwrap();
        let [plain, decayed] = [0.0, 0.5].map(|decay| case(decay).run(&optimizer));
        assert_eq!(plain.states, decayed.states);
        assert_eq!((plain.master[1], decayed.master[1]), (1.0, 0.95));
    }
}
