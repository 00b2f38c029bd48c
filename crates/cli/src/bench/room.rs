//! Whether a bench fits this machine.

use oxizero_core::{Bytes, ConfigError};

use super::resident::available;
use crate::error::CliError;

/// Refuses `value` for option `field` if what all ranks `need` for it is more than the machine has;
/// returns what they need.
pub(crate) fn check(field: &str, value: &dyn ToString, need: Bytes) -> Result<Bytes, CliError> {
    let available = available().map_err(|error| CliError::Start(error.to_string()))?;
    if need <= available {
        return Ok(need);
    }
    let allowed = format!("what fits: it needs {need}, and {available} are available");
    Err(ConfigError::Value { field: field.into(), value: value.to_string(), allowed }.into())
}
