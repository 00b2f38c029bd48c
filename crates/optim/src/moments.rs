//! The two moments of Adam, and the step that they give.

use std::fmt;

use crate::error::{OptimError, check, check_eps};
use crate::tiny::{TINY, TINY_ROOT, zero_below};

/// The names of Adam's states.
pub(crate) const STATE_NAMES: &[&str] = &["exp_avg", "exp_avg_sq"];

/// The options that Adam and AdamW share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MomentOptions {
    /// The decay of the first moment, the average of gradients; in [0, 1).
    pub beta1: f64,
    /// The decay of the second moment, the average of squared gradients; in [0, 1).
    pub beta2: f64,
    /// What is added to the root of the second moment; a positive normal f32.
    pub eps: f64,
}

impl Default for MomentOptions {
    /// The defaults of `torch.optim`: 0.9, 0.999 and 1e-8.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8 }
    }
}

impl MomentOptions {
    pub(crate) fn validate(self) -> Result<Self, OptimError> {
        for (field, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            check(field, beta, (0.0..1.0).contains(&beta), "0 <= beta < 1")?;
        }
        check_eps(self.eps)?;
        Ok(self)
    }
}

impl fmt::Display for MomentOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { beta1, beta2, eps } = self;
        write!(f, "betas {beta1:?} and {beta2:?}, eps {eps:?}")
    }
}

/// What all elements of one parameter have in common in one update.
#[derive(Clone, Copy)]
pub(crate) struct Moments {
    beta2: f32,
    first_weight: f32,
    second_weight: f32,
    step_size: f32,
    root_correction: f32,
    eps: f32,
}

impl Moments {
    /// The coefficients of a parameter's update number `step`.
    ///
    /// # Panics
    ///
    /// If `step` is 0.
    pub(crate) fn at(options: MomentOptions, lr: f64, step: u64) -> Self {
        let MomentOptions { beta1, beta2, eps } = options;
        assert!(step > 0, "updates are counted from 1");
        // The power is 0 long before the exponent's limit, whatever the beta.
        let exponent = i32::try_from(step).unwrap_or(i32::MAX);
        Self {
            beta2: beta2 as f32,
            first_weight: (1.0 - beta1) as f32,
            second_weight: (1.0 - beta2) as f32,
            step_size: (lr / (1.0 - beta1.powi(exponent))) as f32,
            root_correction: (1.0 - beta2.powi(exponent)).sqrt() as f32,
            eps: eps as f32,
        }
    }

    /// What is to be subtracted from the weight after `grad`, and the new moments.
    #[inline(always)]
    pub(crate) fn advance(&self, grad: f32, [first, second]: [f32; 2]) -> (f32, [f32; 2]) {
        let first = zero_below(TINY, lerp(first, grad, self.first_weight));
        let root = zero_below(TINY_ROOT, grad);
        let square = self.second_weight * root * root;
        let second = zero_below(f32::MIN_POSITIVE, second * self.beta2 + square);
        let denominator = second.sqrt() / self.root_correction + self.eps;
        (self.step_size * first / denominator, [first, second])
    }
}

/// From `start` (at weight 0) to `end` (at weight 1); each is met exactly.
#[inline(always)]
fn lerp(start: f32, end: f32, weight: f32) -> f32 {
    if weight < 0.5 { start + weight * (end - start) } else { end - (end - start) * (1.0 - weight) }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Hyper;
    use crate::reference::flush;

    pub(crate) fn any_options() -> impl Strategy<Value = MomentOptions> {
        let beta = || prop_oneof![0.0..1.0, 0.9..0.9999, Just(0.0), Just(0.5)];
        let eps = prop::sample::select(vec![1e-8, 1e-15, 1e-3]);
        (beta(), beta(), eps).prop_map(|(beta1, beta2, eps)| MomentOptions { beta1, beta2, eps })
    }

    /// The update of one element by Adam, once weight decay is done with: the formula as it stands
    /// in the documentation, with every coefficient worked out anew.
    pub(crate) fn reference(
        options: MomentOptions,
        hyper: Hyper,
        step: u64,
        (g, p): (f32, f32),
        [m, v]: [f32; 2],
    ) -> (f32, [f32; 2]) {
        let MomentOptions { beta1, beta2, eps } = options;
        let weight = (1.0 - beta1) as f32;
        let m = if weight < 0.5 { m + weight * (g - m) } else { g - (g - m) * (1.0 - weight) };
        let m = flush(2.0_f32.powi(-100), m);
        let root = flush(2.0_f32.powi(-58), g);
        let v = v * beta2 as f32 + (1.0 - beta2) as f32 * root * root;
        let v = flush(2.0_f32.powi(-126), v);
        let step_size = (hyper.lr / (1.0 - beta1.powi(step as i32))) as f32;
        let denominator = v.sqrt() / (1.0 - beta2.powi(step as i32)).sqrt() as f32 + eps as f32;
        (p - step_size * m / denominator, [m, v])
    }

    #[test]
    fn lerp_meets_both_ends() {
        for (start, end) in [(1.0e-7, 1.0), (3.0, -1.0e8)] {
            assert_eq!(lerp(start, end, 0.0), start);
            assert_eq!(lerp(start, end, 1.0), end);
        }
    }

    #[test]
    fn options_out_of_range_are_refused_by_name() {
        let options = MomentOptions::default();
        options.validate().unwrap();
        let refuse = |options: MomentOptions| options.validate().unwrap_err().to_string();
        for beta in [-0.1, 1.0, f64::NAN] {
            assert!(refuse(MomentOptions { beta1: beta, ..options }).contains("`beta1 = "));
            assert!(refuse(MomentOptions { beta2: beta, ..options }).contains("`beta2 = "));
        }
        for eps in [0.0, -1e-8, 1e-46, f64::INFINITY, f64::NAN] {
            assert!(refuse(MomentOptions { eps, ..options }).contains("`eps = "));
        }
        assert_eq!(
            refuse(MomentOptions { beta1: 1.0, ..options }),
            "`beta1 = 1` is not possible; allowed: 0 <= beta < 1"
        );
    }

    #[test]
    #[should_panic(expected = "counted from 1")]
    fn there_is_no_update_number_zero() {
        Moments::at(MomentOptions::default(), 0.1, 0);
    }
}
