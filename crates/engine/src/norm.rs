//! The size of a gradient, of which each rank measures its own shards.

use oxizero_device::kernels::Power;
use oxizero_device::{View, kernels};

/// What is clipped and reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Norm {
    /// The sum of magnitudes.
    One,
    /// The root of the sum of squares.
    #[default]
    Two,
    /// The cube root of the sum of cubed magnitudes.
    Three,
    /// The largest magnitude.
    Infinity,
}

impl Norm {
    /// Adds the quotients of `grad` and `divisor` to `part`, which starts at 0. Returns whether all
    /// of them are finite; if not, the part is not either.
    pub(crate) fn measure(self, grad: View<'_>, divisor: f32, part: &mut f64) -> bool {
        let power = match self {
            Self::One => Power::One,
            Self::Two => Power::Two,
            Self::Three => Power::Three,
            Self::Infinity => {
                let largest = kernels::divided_largest(grad, divisor);
                *part = larger(*part, f64::from(largest));
                return largest.is_finite();
            }
        };
        let powers = kernels::divided_powers(grad, divisor, power);
        *part += powers.sum;
        powers.finite
    }

    /// The norm of a gradient that was measured in parts.
    pub(crate) fn of_parts(self, parts: impl Iterator<Item = f64>) -> f64 {
        match self {
            Self::One => parts.sum(),
            Self::Two => parts.sum::<f64>().sqrt(),
            Self::Three => parts.sum::<f64>().cbrt(),
            Self::Infinity => parts.fold(0.0, larger),
        }
    }
}

/// Not a number if one of them is none; [`f64::max`] would forget it.
fn larger(first: f64, second: f64) -> f64 {
    if first.is_nan() || first >= second { first } else { second }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_make_the_norm_of_the_whole() {
        let cube = f64::cbrt(91.0);
        for (norm, expected) in
            [(Norm::One, 7.0), (Norm::Two, 5.0), (Norm::Three, cube), (Norm::Infinity, 4.0)]
        {
            let mut parts = [0.0; 3];
            assert!(norm.measure(View::F32(&[6.0]), 2.0, &mut parts[0]));
            assert!(norm.measure(View::F32(&[0.0, -8.0]), 2.0, &mut parts[2]));
            assert_eq!(norm.of_parts(parts.into_iter()), expected);
            assert!(!norm.measure(View::F32(&[1.0, f32::NAN, 2.0]), 2.0, &mut parts[0]));
            assert!(norm.measure(View::F32(&[3.0]), 2.0, &mut parts[0]));
            assert!(norm.of_parts(parts.into_iter()).is_nan());
        }
    }
}
