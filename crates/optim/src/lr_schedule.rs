//! How the learning rate changes over the steps.

use std::f64::consts::PI;
use std::fmt;

use crate::OptimError;
use crate::error::check;

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decay {
    /// Not at all.
    #[default]
    Constant,
    /// Along a straight line.
    Linear,
    /// Along half a period of a cosine ("SGDR", Loshchilov and Hutter, without restarts).
    Cosine,
}

/// What the learning rate is multiplied by, as a function of the steps applied so far.
///
/// The factor rises in `warmup_steps` equal parts to 1, which it has in the last of them, so that
/// the first step is not lost at a learning rate of 0. Then it falls from 1 as `decay` says, and is
/// `min_factor` from `total_steps` applied steps on: the last of `total_steps` is not lost at a
/// `min_factor` of 0 either. (torch's `CosineAnnealingLR` with a `T_max` of that many steps, and
/// transformers' cosine and linear schedules end there, too.) Skipped steps do not count, so a
/// schedule never runs ahead of its training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    decay: Decay,
    warmup_steps: u64,
    total_steps: u64,
    min_factor: f64,
}

impl LrSchedule {
    /// A factor that is 1 after `warmup_steps` steps.
    pub fn constant(warmup_steps: u64) -> Self {
        Self { decay: Decay::Constant, warmup_steps, total_steps: u64::MAX, min_factor: 1.0 }
    }

    /// A factor that falls to `min_factor` at `total_steps`, warm-up included.
    ///
    /// Refuses a `min_factor` outside [0, 1], and a decay that would begin (after the warm-up) no
    /// earlier than it ends. [`Decay::Constant`] looks at neither.
    pub fn new(
        decay: Decay,
        warmup_steps: u64,
        total_steps: u64,
        min_factor: f64,
    ) -> Result<Self, OptimError> {
        if decay == Decay::Constant {
            return Ok(Self::constant(warmup_steps));
        }
        let in_range = (0.0..=1.0).contains(&min_factor);
        check("min_factor", min_factor, in_range, "0 <= min_factor <= 1")?;
        let allowed = format!("more than the {warmup_steps} steps of warm-up");
        check("total_steps", total_steps as f64, total_steps > warmup_steps, &allowed)?;
        Ok(Self { decay, warmup_steps, total_steps, min_factor })
    }

    /// The factor of the step after `applied_steps` applied ones.
    pub fn factor(&self, applied_steps: u64) -> f64 {
        if applied_steps < self.warmup_steps {
            return (applied_steps + 1) as f64 / self.warmup_steps as f64;
        }
        let decay_steps = (self.total_steps - self.warmup_steps) as f64;
        let progress = ((applied_steps - self.warmup_steps) as f64 / decay_steps).min(1.0);
        let left = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + (PI * progress).cos()),
        };
        self.min_factor + (1.0 - self.min_factor) * left
    }
}

impl fmt::Display for LrSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { decay, warmup_steps, total_steps, min_factor } = self;
        let falls = match decay {
            Decay::Constant => return write!(f, "constant after {warmup_steps} steps of warm-up"),
            Decay::Linear => "linear",
            Decay::Cosine => "cosine",
        };
        write!(
            f,
            "{falls} to {min_factor:?} at step {total_steps}, after {warmup_steps} of warm-up"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(schedule: LrSchedule, steps: std::ops::Range<u64>) -> Vec<f64> {
        steps.map(|step| schedule.factor(step)).collect()
    }

    #[test]
    fn warm_up_rises_in_equal_parts_and_wastes_no_step() {
        let schedule = LrSchedule::constant(4);
        assert_eq!(factors(schedule, 0..6), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        assert_eq!(LrSchedule::constant(0).factor(0), 1.0);
        assert_eq!(LrSchedule::constant(4).factor(u64::MAX), 1.0);
    }

    #[test]
    fn linear_falls_in_equal_parts() {
        let schedule = LrSchedule::new(Decay::Linear, 2, 6, 0.0).unwrap();
        assert_eq!(factors(schedule, 0..8), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
        let schedule = LrSchedule::new(Decay::Linear, 0, 4, 0.5).unwrap();
        assert_eq!(factors(schedule, 0..6), [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]);
    }

    #[test]
    fn cosine_falls_by_half_in_the_middle() {
        let schedule = LrSchedule::new(Decay::Cosine, 10, 30, 0.1).unwrap();
        assert_eq!(schedule.factor(10), 1.0);
        assert!((schedule.factor(20) - 0.55).abs() < 1e-12);
        assert_eq!(factors(schedule, 30..32), [0.1, 0.1]);
        let falling = factors(schedule, 10..31);
        assert!(falling.windows(2).all(|pair| pair[1] < pair[0]), "{falling:?}");
    }

    /// As transformers' `get_cosine_schedule_with_warmup` has it without a warm-up.
    #[test]
    fn the_last_step_comes_before_the_smallest_factor() {
        let schedule = LrSchedule::new(Decay::Cosine, 0, 4, 0.0).unwrap();
        let expected = [1.0, 0.853_553_390_593_273_8, 0.5, 0.146_446_609_406_726_24, 0.0];
        for (factor, expected) in factors(schedule, 0..5).into_iter().zip(expected) {
            assert!((factor - expected).abs() < 1e-15, "{factor} {expected}");
        }
    }

    #[test]
    fn factors_stay_between_the_smallest_and_one() {
        for decay in [Decay::Linear, Decay::Cosine] {
            let schedule = LrSchedule::new(decay, 3, 50, 0.2).unwrap();
            assert!(factors(schedule, 3..100).iter().all(|factor| (0.2..=1.0).contains(factor)));
        }
    }

    #[test]
    fn impossible_schedules_are_refused_by_name() {
        let refuse =
            |total, min| LrSchedule::new(Decay::Cosine, 10, total, min).unwrap_err().to_string();
        assert_eq!(
            refuse(10, 0.0),
            "`total_steps = 10` is not possible; allowed: more than the 10 steps of warm-up"
        );
        for min in [-0.1, 1.5, f64::NAN] {
            assert!(refuse(20, min).contains("min_factor"));
        }
        LrSchedule::new(Decay::Constant, 10, 5, 9.0).unwrap();
    }
}
