//! Range checks that all sections share.

use std::fmt;
use std::ops::RangeInclusive;

use crate::ConfigError;

/// The largest size of one dimension, so that no number of elements overflows.
pub(super) const SIZE_MAX: usize = 1 << 20;

/// The largest number of steps, layers apart the largest count of anything.
pub(super) const COUNT_MAX: usize = 1 << 40;

/// Refuses a count outside `range`.
pub(super) fn count(
    field: &str,
    value: usize,
    range: RangeInclusive<usize>,
) -> Result<(), ConfigError> {
    let allowed = format!("{} to {}", range.start(), range.end());
    that(range.contains(&value), field, value, &allowed)
}

/// Whether rounding to f32, in which tensors are updated, keeps `value` above 0 and finite.
fn is_normal(value: f64) -> bool {
    (f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX)).contains(&value)
}

/// Refuses a number that is not finite or not above zero.
pub(super) fn positive(field: &str, value: f64) -> Result<(), ConfigError> {
    let allowed = "a finite number above 0, normal in f32 (1.2e-38 to 3.4e38)";
    that(is_normal(value), field, value, allowed)
}

/// Refuses a number that is not finite or below zero.
pub(super) fn not_negative(field: &str, value: f64) -> Result<(), ConfigError> {
    let allowed = "0, or a finite number above it, normal in f32 (1.2e-38 to 3.4e38)";
    that(value == 0.0 || is_normal(value), field, value, allowed)
}

/// Refuses a number outside `[0, 1)`.
pub(super) fn below_one(field: &str, value: f64) -> Result<(), ConfigError> {
    that(is_below_one(value), field, value, "0 or more, and below 1 when rounded to f32")
}

/// Whether `value` is in `[0, 1)`, and stays there in f32.
pub(super) fn is_below_one(value: f64) -> bool {
    value >= 0.0 && (value as f32) < 1.0
}

/// Refuses an empty path.
pub(super) fn path(field: &str, value: Option<&str>) -> Result<(), ConfigError> {
    that(value != Some(""), field, "", "a path; leave the field out for the default")
}

/// Refuses `value` unless `possible`.
pub(super) fn that(
    possible: bool,
    field: &str,
    value: impl fmt::Debug,
    allowed: &str,
) -> Result<(), ConfigError> {
    let refusal = || ConfigError::Value {
        field: field.into(),
        value: format!("{value:?}"),
        allowed: allowed.into(),
    };
    if possible { Ok(()) } else { Err(refusal()) }
}
