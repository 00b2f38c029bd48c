//! Elements of each dtype, to and from f32.
//!
//! The conversions are branch-free integer arithmetic, so that loops over them vectorise; their
//! results are those of the `half` crate, NaNs' bits included, but that a bf16 is widened as it is.

use bytemuck::Pod;
use half::{bf16, f16};

/// What a buffer of the host holds.
pub trait Element: Pod {
    /// The same number; exact. A NaN stays one, and keeps its payload.
    fn widen(self) -> f32;

    /// The nearest number, ties to even; infinite where that is too large. A NaN keeps its sign
    /// and what fits of its payload, and is made quiet where it is narrowed.
    fn narrow(value: f32) -> Self;

    /// Whether it is neither infinite nor NaN.
    fn is_finite(self) -> bool;
}

/// The bit that makes a NaN of f32 quiet.
const QUIET: u32 = 0x0040_0000;
const SIGN: u32 = 0x8000_0000;
const INFINITY: u32 = 0x7F80_0000;
/// A step of an f32's exponent.
const EXPONENT: u32 = 0x0080_0000;

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        self.to_bits() & !SIGN < INFINITY
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        // Half a unit in the last place, less one where the kept part is even: ties go to even.
        let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
        let bits = if bits & !SIGN > INFINITY { bits | QUIET } else { rounded };
        Self::from_bits((bits >> 16) as u16)
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        self.to_bits() & 0x7FFF < Self::INFINITY.to_bits()
    }
}

/// The smallest normal f16, 2^-14, as f32.
const F16_NORMAL: u32 = (127 - 14) * EXPONENT;
/// 2^16, as f32: twice the largest power of two that is an f16.
const F16_ABOVE: u32 = (127 + 16) * EXPONENT;
/// What the exponents of equal numbers differ by in f32 and f16.
const F16_BIAS: u32 = (127 - 15) * EXPONENT;
/// 2^-1: its last place, 2^-24, is that of the f16 below 2^-14.
const F16_DENORMAL: u32 = (127 - 1) * EXPONENT;

impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = (bits & 0x7FFF) << 13;
        let denormal = f32::from_bits(magnitude + F16_NORMAL) - f32::from_bits(F16_NORMAL);
        // Infinity and NaN have the largest exponent in both.
        let special = magnitude + 2 * F16_BIAS;
        let quiet = if magnitude > 0x7C00 << 13 { QUIET } else { 0 };
        let wide = if magnitude < 0x0400 << 13 { denormal.to_bits() } else { magnitude + F16_BIAS };
        let wide = if magnitude >= 0x7C00 << 13 { special | quiet } else { wide };
        f32::from_bits(wide | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & !SIGN;
        let odd = magnitude >> 13 & 1;
        let normal = magnitude.wrapping_sub(F16_BIAS).wrapping_add(0x0FFF + odd) >> 13;
        // The addition rounds to a multiple of 2^-24, ties to even; the sum's last bits count them.
        let counted = f32::from_bits(magnitude) + f32::from_bits(F16_DENORMAL);
        let denormal = counted.to_bits().wrapping_sub(F16_DENORMAL);
        let nan = 0x7E00 | magnitude >> 13 & 0x03FF;
        let narrow = if magnitude < F16_NORMAL { denormal } else { normal };
        let narrow = if magnitude >= F16_ABOVE { 0x7C00 } else { narrow };
        let narrow = if magnitude > INFINITY { nan } else { narrow };
        Self::from_bits((narrow | bits >> 16 & 0x8000) as u16)
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        self.to_bits() & 0x7FFF < Self::INFINITY.to_bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_16_bit_element_widens_as_halfs() {
        for bits in 0..=u16::MAX {
            let (brain, half) = (bf16::from_bits(bits), f16::from_bits(bits));
            assert_eq!(brain.widen().to_bits(), u32::from(bits) << 16, "bf16 {bits:#x}");
            assert!(brain.is_nan() || brain.widen() == brain.to_f32(), "bf16 {bits:#x}");
            assert_eq!(half.widen().to_bits(), half.to_f32().to_bits(), "f16 {bits:#x}");
        }
    }

    fn assert_narrows(bits: u32) {
        let value = f32::from_bits(bits);
        assert_eq!(bf16::narrow(value).to_bits(), bf16::from_f32(value).to_bits(), "{bits:#x}");
        assert_eq!(f16::narrow(value).to_bits(), f16::from_f32(value).to_bits(), "{bits:#x}");
    }

    /// Every sign, exponent and upper half of the mantissa, with the lower bits around each tie:
    /// bits 0 to 15 decide the rounding to bf16, bits 0 to 12 that to f16, and to its denormals
    /// more.
    #[test]
    fn numbers_around_every_tie_narrow_as_halfs() {
        let lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF];
        for upper in 0..=u16::MAX {
            for lower in lower {
                assert_narrows(u32::from(upper) << 16 | lower);
            }
        }
    }

    #[test]
    #[ignore = "minutes without optimisation: all 2^32"]
    fn every_f32_narrows_as_halfs() {
        (0..=u32::MAX).for_each(assert_narrows);
    }
}
