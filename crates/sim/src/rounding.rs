//! Rounding of f32 to narrower dtypes, by hand: the engine uses a library, and this must not.

use oxizero_core::DType;

/// The value of `dtype` nearest to `value`, ties to even, as f32. What is too large is infinite.
pub fn round(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::Bf16 => round_to(value, 8, -126, 128),
        DType::F16 => round_to(value, 11, -14, 16),
    }
}

/// Rounds to `digits` significant bits, with exponents from `lowest` (below which spacing is
/// constant) to below `highest`.
fn round_to(value: f32, digits: i32, lowest: i32, highest: i32) -> f32 {
    if !value.is_finite() || value == 0.0 {
        return value;
    }
    // All f32 are normal in f64, whose exponent can be read off its bits.
    let wide = f64::from(value);
    let exponent = ((wide.to_bits() >> 52) & 0x7FF) as i32 - 1023;
    let spacing = 2_f64.powi(exponent.max(lowest) - (digits - 1));
    let rounded = (wide / spacing).round_ties_even() * spacing;
    let too_large = rounded.abs() >= 2_f64.powi(highest);
    if too_large { f32::INFINITY.copysign(value) } else { rounded as f32 }
}

#[cfg(test)]
#[expect(clippy::excessive_precision, reason = "exact values are written in full")]
mod tests {
    use super::*;

    #[test]
    fn bf16_keeps_eight_bits_and_ties_go_to_even() {
        let cases = [
            (1.0, 1.0),
            (1.003_906_25, 1.0),       // half a step above an even neighbour
            (1.011_718_75, 1.015_625), // half a step above an odd one
            (1.003_906_4, 1.007_812_5),
            (257.0, 256.0),
            (-3.3, -3.296_875),
            (f32::MAX, f32::INFINITY),
            (1e-40, 9.183_55e-41),  // a denormal of bf16
            (4.591_774_8e-41, 0.0), // half the smallest
        ];
        for (value, expected) in cases {
            assert_eq!(round(value, DType::Bf16), expected, "{value:e}");
        }
        assert!(round(f32::NAN, DType::Bf16).is_nan());
    }

    #[test]
    fn f16_keeps_eleven_bits_and_overflows_above_65504() {
        let cases = [
            (2049.0, 2048.0),
            (2051.0, 2052.0),
            (65519.0, 65504.0),
            (65520.0, f32::INFINITY),
            (-70000.0, f32::NEG_INFINITY),
            (5.960_464_5e-8, 5.960_464_5e-8), // the smallest, 2^-24
            (2.980_232_2e-8, 0.0),            // half of it
            (4.470_348_4e-8, 5.960_464_5e-8), // three quarters of it
        ];
        for (value, expected) in cases {
            assert_eq!(round(value, DType::F16), expected, "{value:e}");
        }
    }
}
