//! The size of a gradient, of which each rank measures its own shards.

use oxizero_device::View;
use oxizero_device::kernels::{self, Measure, Measured, Power};

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
    /// Measures the quotients of each of `grads` and `divisor`; and the checksums of `weights`.
    pub(crate) fn measure_with(
        self,
        weights: &[View<'_>],
        grads: &[View<'_>],
        divisor: f32,
    ) -> (Vec<Measured>, Vec<u64>) {
        let measure = match self {
            Self::One => Measure::Sum(Power::One),
            Self::Two => Measure::Sum(Power::Two),
            Self::Three => Measure::Sum(Power::Three),
            Self::Infinity => Measure::Largest,
        };
        kernels::measure_with(weights, (grads, divisor, measure))
    }

    /// Adds what was measured to `part`, which starts at 0.
    pub(crate) fn add(self, measured: Measured, part: &mut f64) {
        match self {
            Self::Infinity => *part = larger(*part, measured.size),
            Self::One | Self::Two | Self::Three => *part += measured.size,
        }
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
            let mut add = |values: &[f32], divisor, part: usize| {
                let measured = norm.measure_with(&[], &[View::F32(values)], divisor).0[0];
                norm.add(measured, &mut parts[part]);
                (measured.finite, norm.of_parts(parts.into_iter()))
            };
            assert!(add(&[6.0], 2.0, 0).0);
            assert_eq!(add(&[0.0, -8.0], 2.0, 2), (true, expected));
            assert!(!add(&[1.0, f32::NAN, 2.0], 2.0, 0).0);
            let (finite, size) = add(&[3.0], 2.0, 0);
            assert!(finite && size.is_nan());
        }
    }
}
