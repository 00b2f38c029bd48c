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

/// Refuses a number that is not finite or not above zero.
pub(super) fn positive(field: &str, value: f64) -> Result<(), ConfigError> {
    that(value.is_finite() && value > 0.0, field, value, "a finite number above 0")
}

/// Refuses a number that is not finite or below zero.
pub(super) fn not_negative(field: &str, value: f64) -> Result<(), ConfigError> {
    that(value.is_finite() && value >= 0.0, field, value, "a finite number, 0 or more")
}

/// Refuses a number outside `[0, 1)`.
pub(super) fn below_one(field: &str, value: f64) -> Result<(), ConfigError> {
    that((0.0..1.0).contains(&value), field, value, "0 or more, and below 1")
}

/// Refuses an empty path.
pub(super) fn path(field: &str, value: Option<&str>) -> Result<(), ConfigError> {
    that(value != Some(""), field, "\"\"", "a path; leave the field out for the default")
}

/// Refuses `value` unless `possible`.
pub(super) fn that(
    possible: bool,
    field: &str,
    value: impl fmt::Display,
    allowed: &str,
) -> Result<(), ConfigError> {
    let refusal = || ConfigError::Value {
        field: field.into(),
        value: value.to_string(),
        allowed: allowed.into(),
    };
    if possible { Ok(()) } else { Err(refusal()) }
}
