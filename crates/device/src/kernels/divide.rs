//! Division, and the sum of squares that a norm is made of.

use half::{bf16, f16};

use super::cast::{as_f32, narrow, widen};
use super::{BLOCK, HANDED_ON, blocks, of_device};
use crate::{View, ViewMut};

/// Partial sums of powers that run beside each other, so that additions need not wait for the one
/// before.
const LANES: usize = 16;
const _: () = assert!(BLOCK.is_multiple_of(LANES), "a block starts at the first lane");

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
    if let Some(View::Device(first)) = grads.first() {
        let device = first.device();
        let grads: Vec<_> = grads.iter().map(|grad| of_device(*grad)).collect();
        let sizes = device.measure(&grads, divisor, measure).into_iter();
        return sizes.map(|size| Measured { size, finite: size.is_finite() }).collect();
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
    grads.iter().map(of).collect()
}

/// Divides each element by `divisor` in registers, and returns the powers of the quotients. The
/// elements lie on the host; see [`measure`].
pub fn divided_powers(grad: View<'_>, divisor: f32, power: Power) -> Powers {
    match power {
        Power::One => sum_of(grad, divisor, magnitude),
        Power::Two => sum_of(grad, divisor, square),
        Power::Three => sum_of(grad, divisor, |quotient| square(quotient) * magnitude(quotient)),
    }
}

/// [`divided_powers`] for squares.
pub fn divided_squares(grad: View<'_>, divisor: f32) -> Powers {
    divided_powers(grad, divisor, Power::Two)
}

fn sum_of(grad: View<'_>, divisor: f32, term: impl Fn(f32) -> f64 + Copy) -> Powers {
    let mut lanes = [0.0; LANES];
    let mut wide = [0.0; BLOCK];
    for block in blocks(grad.numel().0) {
        add_terms(as_f32(grad.range(block), &mut wide), divisor, term, &mut lanes);
    }
    let sum = lanes.iter().sum::<f64>();
    // The cube of the largest f32 is 2^384, so a sum of powers in f64 overflows only after 2^640 of
    // them; it is infinite or NaN only if a quotient was.
    Powers { sum, finite: sum.is_finite() }
}

fn add_terms(values: &[f32], divisor: f32, term: impl Fn(f32) -> f64, lanes: &mut [f64; LANES]) {
    let (rows, rest) = values.as_chunks::<LANES>();
    for row in rows {
        for (lane, value) in lanes.iter_mut().zip(row) {
            *lane += term(value / divisor);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += term(value / divisor);
    }
}

fn magnitude(value: f32) -> f64 {
    f64::from(value).abs()
}

/// Divides each element by `divisor` in registers, and returns the largest magnitude of the
/// quotients: 0 of none, infinite if one is, and NaN if one is. The elements lie on the host; see
/// [`measure`].
pub fn divided_largest(grad: View<'_>, divisor: f32) -> f32 {
    // Without the sign, the bits of floats are ordered as they are, and NaN above them all.
    let magnitude = |value: &f32| (value / divisor).to_bits() & 0x7FFF_FFFF;
    let mut wide = [0.0; BLOCK];
    let largest = |block| {
        let values = as_f32(grad.range(block), &mut wide);
        values.iter().map(magnitude).fold(0, u32::max)
    };
    f32::from_bits(blocks(grad.numel().0).map(largest).fold(0, u32::max))
}

/// Whether every element is finite.
pub(super) fn all_finite(values: View<'_>) -> bool {
    // Without the sign, the bits of what is infinite or NaN are not below those of infinity.
    match values {
        View::F32(values) => {
            let bits = values.iter().map(|value| value.to_bits() & 0x7FFF_FFFF);
            bits.fold(0, u32::max) < f32::INFINITY.to_bits()
        }
        View::Bf16(values) => {
            let bits = values.iter().map(|value| value.to_bits() & 0x7FFF);
            bits.fold(0, u16::max) < bf16::INFINITY.to_bits()
        }
        View::F16(values) => {
            let bits = values.iter().map(|value| value.to_bits() & 0x7FFF);
            bits.fold(0, u16::max) < f16::INFINITY.to_bits()
        }
        View::Device(_) => unreachable!("{HANDED_ON}"),
    }
}

/// Exact: an f32 has 24 significant bits, and an f64 has 53.
fn square(value: f32) -> f64 {
    f64::from(value) * f64::from(value)
}

/// Divides each element by `divisor` where it lies, rounding once to `grad`'s dtype.
pub fn divide(mut grad: ViewMut<'_>, divisor: f32) {
    match grad {
        ViewMut::F32(values) => return divide_each(values, divisor),
        ViewMut::Device(grad) => return grad.device().divide(grad, divisor),
        ViewMut::Bf16(_) | ViewMut::F16(_) => {}
    }
    let mut wide = [0.0; BLOCK];
    for block in blocks(grad.as_view().numel().0) {
        let wide = &mut wide[..block.len()];
        widen(grad.as_view().range(block.clone()), wide);
        divide_each(wide, divisor);
        narrow(wide, grad.reborrow().range(block));
    }
}

fn divide_each(values: &mut [f32], divisor: f32) {
    for value in values {
        *value /= divisor;
    }
}
