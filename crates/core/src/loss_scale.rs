//! The factor that a loss was multiplied by before backward.

use serde::{Deserialize, Serialize};

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

/// How the loss scale is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LossScaling {
    /// It stays what it is; [`LossScale::ONE`] for models that need none.
    Fixed(LossScale),
    /// It is halved when a gradient overflows, and doubled when none did for a while.
    Dynamic(DynamicLossScale),
}

impl Default for LossScaling {
    fn default() -> Self {
        Self::Fixed(LossScale::ONE)
    }
}

/// When a dynamic loss scale changes. Source: DeepSpeed's and Megatron's fp16 settings of the same
/// names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicLossScale {
    /// The first scale.
    pub initial: f32,
    /// The scale is doubled after so many steps without overflow.
    pub loss_scale_window: u64,
    /// The scale is halved at this overflow of a row, counted from 1; those before it only skip.
    pub hysteresis: u64,
    /// A step without overflow refills the hysteresis; else only a doubling does.
    pub consecutive_hysteresis: bool,
    /// The scale is never halved below this.
    pub minimum: f32,
}

impl Default for DynamicLossScale {
    fn default() -> Self {
        Self {
            initial: 65536.0,
            loss_scale_window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            minimum: 1.0,
        }
    }
}

impl LossScaling {
    /// Refuses what cannot scale a loss; errors name the field.
    pub fn validate(self) -> Result<(), ConfigError> {
        let Self::Dynamic(dynamic) = self else { return Ok(()) };
        let refuse = |field: &str, value: String, allowed: &str| {
            Err(ConfigError::Value { field: field.into(), value, allowed: allowed.into() })
        };
        for (field, value) in [("initial", dynamic.initial), ("minimum", dynamic.minimum)] {
            if !(value > 0.0 && value.is_finite()) {
                let field = format!("loss_scale.{field}");
                return refuse(&field, value.to_string(), "a finite number above 0");
            }
        }
        if dynamic.initial < dynamic.minimum {
            let initial = dynamic.initial.to_string();
            return refuse("loss_scale.initial", initial, "loss_scale.minimum or above");
        }
        if dynamic.loss_scale_window == 0 {
            return refuse("loss_scale.loss_scale_window", "0".into(), "1 or more steps");
        }
        if dynamic.hysteresis == 0 {
            return refuse("loss_scale.hysteresis", "0".into(), "1 or more overflows");
        }
        Ok(())
    }
}

/// The loss scale of the next window. Never asked to unscale: gradients carry their own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaler {
    scaling: LossScaling,
    scale: f32,
    steps_since_overflow: u64,
    overflows_left: u64,
}

/// Where a dynamic loss scale is, for a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LossScalerState {
    /// The scale of the next window; finite and above 0.
    pub scale: f32,
    /// Steps that were applied since the last overflow.
    pub steps_since_overflow: u64,
    /// Overflows after which the scale is halved; at least 1.
    pub overflows_left: u64,
}

/// An overflow at a scale that may not be halved any more.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error(
    "gradients overflow at the minimum loss scale {minimum}: the loss or the gradients are not \
     finite by themselves; lower the learning rate, or train in bf16, or lower the minimum"
)]
pub struct LossScaleAtMinimum {
    /// The scale.
    pub minimum: f32,
}

impl LossScaler {
    /// Starts from the initial scale.
    pub fn new(scaling: LossScaling) -> Result<Self, ConfigError> {
        scaling.validate()?;
        let (scale, overflows_left) = match scaling {
            LossScaling::Fixed(scale) => (scale.get(), 0),
            LossScaling::Dynamic(dynamic) => (dynamic.initial, dynamic.hysteresis),
        };
        Ok(Self { scaling, scale, steps_since_overflow: 0, overflows_left })
    }

    /// What to multiply the losses of the next window by.
    pub fn scale(&self) -> LossScale {
        LossScale(self.scale)
    }

    /// Where the scale is; `None` where it is fixed.
    pub fn state(&self) -> Option<LossScalerState> {
        let Self { scale, steps_since_overflow, overflows_left, .. } = *self;
        let moves = matches!(self.scaling, LossScaling::Dynamic(_));
        moves.then_some(LossScalerState { scale, steps_since_overflow, overflows_left })
    }

    /// Goes on from where another scaler was. A fixed scale stays what it is.
    ///
    /// # Errors
    ///
    /// If the scale is none.
    pub fn resume(&mut self, state: LossScalerState) -> Result<(), ConfigError> {
        let scale = LossScale::new(state.scale)?;
        if matches!(self.scaling, LossScaling::Dynamic(_)) {
            self.scale = scale.get();
            self.steps_since_overflow = state.steps_since_overflow;
            self.overflows_left = state.overflows_left.max(1);
        }
        Ok(())
    }

    /// A step was applied.
    pub fn applied(&mut self) {
        let LossScaling::Dynamic(dynamic) = self.scaling else { return };
        self.steps_since_overflow += 1;
        let grows = self.steps_since_overflow.is_multiple_of(dynamic.loss_scale_window);
        if grows || dynamic.consecutive_hysteresis {
            self.overflows_left = dynamic.hysteresis;
        }
        if grows && (self.scale * 2.0).is_finite() {
            self.scale *= 2.0;
        }
    }

    /// A step was skipped, for a gradient was not finite.
    pub fn overflowed(&mut self) -> Result<(), LossScaleAtMinimum> {
        let LossScaling::Dynamic(dynamic) = self.scaling else { return Ok(()) };
        self.steps_since_overflow = 0;
        if self.overflows_left > 1 {
            self.overflows_left -= 1;
            return Ok(());
        }
        if self.scale <= dynamic.minimum {
            return Err(LossScaleAtMinimum { minimum: dynamic.minimum });
        }
        self.scale = (self.scale / 2.0).max(dynamic.minimum);
        Ok(())
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

    #[test]
    fn a_scaler_that_resumes_goes_on_as_the_other_would_have() {
        let options = DynamicLossScale { loss_scale_window: 3, ..DynamicLossScale::default() };
        let mut first = scaler(options);
        let run = |scaler: &mut LossScaler, steps: &[bool]| {
            for applied in steps {
                if *applied { scaler.applied() } else { scaler.overflowed().unwrap() }
            }
        };
        run(&mut first, &[true, false, false, true, true]);
        let mut second = scaler(options);
        second.resume(first.state().unwrap()).unwrap();
        assert_eq!(second, first);
        run(&mut first, &[true, false]);
        run(&mut second, &[true, false]);
        assert_eq!(second, first);
        let wrong = LossScalerState { scale: f32::NAN, ..first.state().unwrap() };
        assert!(second.resume(wrong).is_err());
        let mut fixed = LossScaler::new(LossScaling::default()).unwrap();
        fixed.resume(first.state().unwrap()).unwrap();
        assert_eq!((fixed.state(), fixed.scale()), (None, LossScale::ONE));
    }

    fn scaler(options: DynamicLossScale) -> LossScaler {
        LossScaler::new(LossScaling::Dynamic(options)).unwrap()
    }

    #[test]
    fn an_overflow_halves_and_a_window_of_good_steps_doubles() {
        let options =
            DynamicLossScale { hysteresis: 1, loss_scale_window: 3, ..DynamicLossScale::default() };
        let mut scaler = scaler(options);
        scaler.overflowed().unwrap();
        assert_eq!(scaler.scale().get(), 32768.0);
        scaler.applied();
        scaler.applied();
        assert_eq!(scaler.scale().get(), 32768.0);
        scaler.applied();
        assert_eq!(scaler.scale().get(), 65536.0);
    }

    #[test]
    fn hysteresis_lets_the_first_overflow_pass() {
        let mut scaler = scaler(DynamicLossScale::default());
        scaler.overflowed().unwrap();
        assert_eq!(scaler.scale().get(), 65536.0);
        scaler.applied();
        scaler.overflowed().unwrap();
        assert_eq!(scaler.scale().get(), 32768.0, "a good step alone does not refill");
        let consecutive =
            DynamicLossScale { consecutive_hysteresis: true, ..DynamicLossScale::default() };
        let mut scaler = self::scaler(consecutive);
        for _ in 0..3 {
            scaler.overflowed().unwrap();
            scaler.applied();
        }
        assert_eq!(scaler.scale().get(), 65536.0);
    }

    #[test]
    fn an_overflow_at_the_minimum_is_an_error_with_advice() {
        let options = DynamicLossScale { initial: 2.0, hysteresis: 1, ..Default::default() };
        let mut scaler = scaler(options);
        scaler.overflowed().unwrap();
        assert_eq!(scaler.scale().get(), 1.0);
        assert!(scaler.overflowed().unwrap_err().to_string().contains("lower the learning rate"));
    }

    #[test]
    fn settings_that_cannot_scale_are_refused_by_field() {
        let good = DynamicLossScale::default();
        for (wrong, field) in [
            (DynamicLossScale { initial: f32::NAN, ..good }, "loss_scale.initial"),
            (DynamicLossScale { initial: -1.0, ..good }, "loss_scale.initial"),
            (DynamicLossScale { initial: 0.5, ..good }, "loss_scale.initial"),
            (DynamicLossScale { minimum: 0.0, ..good }, "loss_scale.minimum"),
            (DynamicLossScale { loss_scale_window: 0, ..good }, "loss_scale.loss_scale_window"),
            (DynamicLossScale { hysteresis: 0, ..good }, "loss_scale.hysteresis"),
        ] {
            let error = LossScaling::Dynamic(wrong).validate().unwrap_err().to_string();
            assert!(error.contains(field), "{error}");
        }
    }

    #[test]
    fn a_fixed_scale_never_moves() {
        let mut scaler = LossScaler::new(LossScaling::Fixed(LossScale::new(8.0).unwrap())).unwrap();
        scaler.overflowed().unwrap();
        scaler.applied();
        assert_eq!(scaler.scale().get(), 8.0);
    }
}
