//! The factor that a loss was multiplied by before backward.

use crate::ConfigError;

/// A loss scale; finite and above 0. A gradient carries the one it was computed under.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale(f32);

impl LossScale {
    /// No scaling.
    pub const ONE: Self = Self(1.0);

    /// Refuses a scale that is not a finite number above 0.
    pub fn new(scale: f32) -> Result<Self, ConfigError> {
        if scale > 0.0 && scale.is_finite() {
            return Ok(Self(scale));
        }
        Err(ConfigError::Value {
            field: "loss_scale".into(),
            value: scale.to_string(),
            allowed: "a finite number above 0".into(),
        })
    }

    /// The factor.
    pub fn get(self) -> f32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_is_finite_and_positive() {
        for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(LossScale::new(wrong).unwrap_err().to_string().contains("loss_scale"));
        }
        assert_eq!(LossScale::new(65536.0).unwrap().get(), 65536.0);
    }
}
