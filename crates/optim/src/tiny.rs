//! What counts as zero; the crate's documentation says why.

/// The smallest gradient, first moment or momentum: 2^-100.
pub(crate) const TINY: f32 = power_of_two(-100);

/// The smallest gradient that has a square: 2^-58.
pub(crate) const TINY_ROOT: f32 = power_of_two(-58);

/// `value`, or +0 where its magnitude is below `floor`. A NaN stays.
#[inline(always)]
pub(crate) fn zero_below(floor: f32, value: f32) -> f32 {
    if value.abs() < floor { 0.0 } else { value }
}

const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constants_are_the_powers_they_say() {
        assert_eq!(TINY, 2.0_f32.powi(-100));
        assert_eq!(TINY_ROOT, 2.0_f32.powi(-58));
    }

    #[test]
    fn only_what_is_below_the_floor_is_zero() {
        assert_eq!(zero_below(TINY, TINY), TINY);
        assert_eq!(zero_below(TINY, -TINY), -TINY);
        assert_eq!(zero_below(TINY, -TINY / 2.0).to_bits(), 0);
        assert!(zero_below(TINY, f32::NAN).is_nan());
    }
}
