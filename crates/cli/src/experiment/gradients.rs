//! How far the gradient of one step is from what it would be if nothing were rounded on the way.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use oxizero::Backend;
use oxizero_core::{DType, Precision};

use super::results::{Cause, GradError, Weights};
use super::setting::Setting;
use crate::error::CliError;
use crate::job::Job;
use crate::launch;
use crate::trainer::Trainer;

/// Bf16 weights as in both settings that are measured, but gradients travel and add in f32.
const REFERENCE: Precision = Precision { reduce: DType::F32, ..Precision::of_model(DType::Bf16) };

/// Measures gradients of one job's model.
pub(super) struct Probe<'a> {
    pub(super) job: &'a Job,
    /// Trained master weights by parameter; absent for the initial ones.
    pub(super) masters: Option<Arc<Masters>>,
    pub(super) interrupt: &'a Arc<AtomicBool>,
}

/// Master weights, by parameter.
pub(super) type Masters = Vec<Vec<f32>>;

impl Probe<'_> {
    /// Measures every cause and window, over the micro-batches that the job begins with.
    pub(super) fn measure(&self, windows: &[usize]) -> Result<Vec<GradError>, CliError> {
        let seed = self.job.config.train.seed;
        let weights = if self.masters.is_some() { Weights::Trained } else { Weights::Initial };
        let mut errors = Vec::new();
        for window in windows.iter().copied() {
            let expected = self.grads(window, REFERENCE, 0)?;
            for cause in Cause::ALL {
                let (precision, step) = match cause {
                    Cause::WideSums => (Setting::WideSums.precision(), 0),
                    Cause::NarrowSums => (Setting::NarrowSums.precision(), 0),
                    Cause::OtherBatch => (REFERENCE, 1),
                };
                let relative = relative_error(&self.grads(window, precision, step)?, &expected);
                errors.push(GradError { seed, cause, window, weights, relative });
            }
        }
        Ok(errors)
    }

    /// Of the micro-batches that training takes in step `step`.
    fn grads(
        &self,
        window: usize,
        precision: Precision,
        step: usize,
    ) -> Result<Vec<Vec<f32>>, CliError> {
        let (mut job, masters) = (self.job.clone(), self.masters.clone());
        job.config.precision = precision;
        job.config.train.gradient_accumulation_steps = window;
        launch::run_here(&self.job.config.run, self.interrupt, move |comm| {
            let mut trainer = Trainer::new(&job, Backend::host(comm))?;
            if let Some(masters) = &masters {
                trainer.set_masters(masters)?;
            }
            trainer.grads(step)
        })
    }
}

/// The length of the difference over the length of what is expected, of all parameters together.
fn relative_error(got: &[Vec<f32>], expected: &[Vec<f32>]) -> f64 {
    let pairs = || got.iter().flatten().zip(expected.iter().flatten());
    let square = |number: f64| number * number;
    let difference: f64 = pairs().map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let length: f64 = pairs().map(|(_, b)| square(f64::from(*b))).sum();
    (difference / length).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_relative_to_all_parameters() {
        let expected = [vec![3.0], vec![0.0, 4.0]];
        assert_eq!(relative_error(&expected, &expected), 0.0);
        assert_eq!(relative_error(&[vec![3.0], vec![0.5, 4.0]], &expected), 0.1);
    }
}
