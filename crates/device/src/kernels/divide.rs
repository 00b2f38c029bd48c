//! Division, and the sum of squares that a norm is made of.

use super::element::Element;
use super::row::{self, ROW, Row};
use super::{checksum, of_device};
use crate::simd::vectorised;
use crate::{View, ViewMut};

/// Partial sums of powers that run beside each other, so that additions need not wait for the one
/// before.
const LANES: usize = 16;
const _: () = assert!(ROW.is_multiple_of(LANES), "a row starts at the first lane");

/// What one pass over a gradient found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Powers {
    /// The sum of the powers of the divided elements' magnitudes, in f64.
    ///
    /// Element `i` is added, in order, to lane `i % 16`; then the lanes are added from the first to
    /// the last. The sum depends on the elements alone, not on where they lie or who computes.
    pub sum: f64,
    /// Whether every divided element is finite.
    pub finite: bool,
}

/// Which power of an element's magnitude is summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    /// The magnitude itself.
    One,
    /// Its square.
    Two,
    /// Its cube.
    Three,
}

/// What is asked of a gradient's quotients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// The sum of their powers.
    Sum(Power),
    /// The largest magnitude.
    Largest,
}

/// What was asked, of one gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// The sum or magnitude.
    pub size: f64,
    /// Whether every quotient is finite; if not, the size is not either.
    pub finite: bool,
}

/// Divides each element of each gradient by `divisor` in registers, and says of each gradient what
/// is asked of the quotients. Those of a device take one read of it for all of them.
///
/// # Panics
///
/// If some of the gradients lie on a device and some do not.
pub fn measure(grads: &[View<'_>], divisor: f32, measure: Measure) -> Vec<Measured> {
    measure_with(&[], (grads, divisor, measure)).0
}

/// [`measure`], and the [`checksums`](super::checksums) of `weights`; of a device in one read.
///
/// # Panics
///
/// If some of all these lie on a device and some do not.
pub fn measure_with(
    weights: &[View<'_>],
    (grads, divisor, measure): (&[View<'_>], f32, Measure),
) -> (Vec<Measured>, Vec<u64>) {
    if let Some(View::Device(first)) = grads.first().or(weights.first()) {
        let grads: Vec<_> = grads.iter().map(|grad| of_device(*grad)).collect();
        let weights: Vec<_> = weights.iter().map(|weights| of_device(*weights)).collect();
        let (sizes, checksums) = first.device().measure(&grads, (divisor, measure), &weights);
        let measured = |size: f64| Measured { size, finite: size.is_finite() };
        return (sizes.into_iter().map(measured).collect(), checksums);
    }
    let of = |grad: &View<'_>| match measure {
        Measure::Sum(power) => {
            let Powers { sum: size, finite } = divided_powers(*grad, divisor, power);
            Measured { size, finite }
        }
        Measure::Largest => {
            let size = divided_largest(*grad, divisor);
            Measured { size: f64::from(size), finite: size.is_finite() }
        }
    };
    (grads.iter().map(of).collect(), checksum::of_host(weights))
}

/// Divides each element by `divisor` in registers, and returns the powers of the quotients. The
/// elements lie on the host; see [`measure`].
pub fn divided_powers(grad: View<'_>, divisor: f32, power: Power) -> Powers {
    match power {
        Power::One => sum_of(grad, divisor, magnitude),
        Power::Two => sum_of(grad, divisor, square),
        Power::Three => sum_of(grad, divisor, cube),
    }
}

/// [`divided_powers`] for squares.
pub fn divided_squares(grad: View<'_>, divisor: f32) -> Powers {
    divided_powers(grad, divisor, Power::Two)
}

#[inline(always)]
fn sum_of(grad: View<'_>, divisor: f32, term: impl Fn(f32) -> f64) -> Powers {
    let mut lanes = [0.0; LANES];
    each_quotients(
        grad,
        divisor,
        #[inline(always)]
        |row| {
            let (parts, _) = row.as_chunks::<LANES>();
            let mut sums = lanes;
            for part in parts {
                for lane in 0..LANES {
                    sums[lane] += term(part[lane]);
                }
            }
            lanes = sums;
        },
    );
    let sum = lanes.iter().sum::<f64>();
    // The cube of the largest f32 is 2^384, so a sum of powers in f64 overflows only after 2^640 of
    // them; it is infinite or NaN only if a quotient was.
    Powers { sum, finite: sum.is_finite() }
}

#[inline(always)]
fn magnitude(value: f32) -> f64 {
    f64::from(value).abs()
}

/// Exact: an f32 has 24 significant bits, and an f64 has 53.
#[inline(always)]
fn square(value: f32) -> f64 {
    f64::from(value) * f64::from(value)
}

#[inline(always)]
fn cube(value: f32) -> f64 {
    square(value) * magnitude(value)
}

/// Divides each element by `divisor` in registers, and returns the largest magnitude of the
/// quotients: 0 of none, infinite if one is, and NaN if one is. The elements lie on the host; see
/// [`measure`].
pub fn divided_largest(grad: View<'_>, divisor: f32) -> f32 {
    // Without the sign, the bits of floats are ordered as they are, and NaN above them all.
    let mut largest = [0; ROW];
    each_quotients(
        grad,
        divisor,
        #[inline(always)]
        |row| {
            for (largest, quotient) in largest.iter_mut().zip(row) {
                *largest = (quotient.to_bits() & 0x7FFF_FFFF).max(*largest);
            }
        },
    );
    f32::from_bits(largest.into_iter().fold(0, u32::max))
}

/// Calls `work` with the quotients of each row; those after the last element are zeros.
#[inline(always)]
fn each_quotients(grad: View<'_>, divisor: f32, mut work: impl FnMut(&Row)) {
    let reciprocal = exact_reciprocal(divisor);
    vectorised(
        #[inline(always)]
        || {
            row::each(
                grad.numel().0,
                #[inline(always)]
                |at| {
                    row::ask(grad, at);
                    work(&quotients(row::read(grad, at), divisor, reciprocal));
                },
            );
        },
    );
}

/// The row divided by `divisor`, whose exact reciprocal is given if there is one.
#[inline(always)]
pub fn quotients(mut row: Row, divisor: f32, reciprocal: Option<f32>) -> Row {
    match reciprocal {
        Some(reciprocal) => row.iter_mut().for_each(|value| *value *= reciprocal),
        None => row.iter_mut().for_each(|value| *value /= divisor),
    }
    row
}

/// What to multiply by instead of dividing by `divisor`, if that gives the same bits: for a power
/// of two, product and quotient are the same number before they are rounded.
pub fn exact_reciprocal(divisor: f32) -> Option<f32> {
    let is_power = divisor.is_normal() && divisor.to_bits() << 9 == 0;
    let reciprocal = 1.0 / divisor;
    (is_power && reciprocal.is_normal()).then_some(reciprocal)
}

/// Divides each element by `divisor` where it lies, rounding once to `grad`'s dtype.
pub fn divide(grad: ViewMut<'_>, divisor: f32) {
    match grad {
        ViewMut::F32(values) => divide_each(values, divisor),
        ViewMut::Bf16(values) => divide_each(values, divisor),
        ViewMut::F16(values) => divide_each(values, divisor),
        ViewMut::Device(grad) => grad.device().divide(grad, divisor),
    }
}

fn divide_each<T: Element>(values: &mut [T], divisor: f32) {
    let reciprocal = exact_reciprocal(divisor);
    vectorised(
        #[inline(always)]
        || {
            row::each(
                values.len(),
                #[inline(always)]
                |at| {
                    row::ask_of(values, at);
                    let row = quotients(row::read_of(values, at), divisor, reciprocal);
                    row::put(&row, values, at);
                },
            );
        },
    );
}
