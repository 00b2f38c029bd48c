//! What a rule or a schedule can be refused for.

/// An option outside what it allows.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// A number that the option cannot be.
    #[error("`{field} = {value}` is not possible; allowed: {allowed}")]
    Value {
        /// The option's name, such as `beta1`.
        field: &'static str,
        /// What was given.
        value: f64,
        /// What may be given.
        allowed: String,
    },
}

/// Refuses a `value` that is not `allowed`, NaN included.
pub(crate) fn check(
    field: &'static str,
    value: f64,
    is_allowed: bool,
    allowed: &str,
) -> Result<(), OptimError> {
    if is_allowed {
        return Ok(());
    }
    Err(OptimError::Value { field, value, allowed: allowed.to_owned() })
}

/// Refuses an `eps` that is not a positive normal f32.
pub(crate) fn check_eps(eps: f64) -> Result<(), OptimError> {
    let normal = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
    let allowed = "a positive number that is normal in f32, such as 1e-8";
    check("eps", eps, normal.contains(&eps), allowed)
}
