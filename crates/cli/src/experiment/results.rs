//! What was measured, and what it comes to.

use std::fmt::Write;

use super::setting::Setting;
use crate::progress::Evaluation;

/// Everything that was measured.
#[derive(Debug, Default)]
pub(super) struct Results {
    /// Every setting of every seed; the settings of a seed begin with the oracle.
    pub(super) runs: Vec<Run>,
    /// In no order.
    pub(super) errors: Vec<GradError>,
}

/// A setting, trained from one seed.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) setting: Setting,
    /// At the same steps in every run; the last is after training.
    pub(super) evaluations: Vec<Evaluation>,
}

/// How far a step's gradient is from one of which nothing is rounded to bf16 on the way.
#[derive(Clone, Copy, Debug)]
pub(super) struct GradError {
    pub(super) seed: u64,
    pub(super) cause: Cause,
    /// Micro-batches that a rank accumulated.
    pub(super) window: usize,
    pub(super) weights: Weights,
    /// The length of the difference over the length of the gradient.
    pub(super) relative: f64,
}

/// Why a gradient differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// It travels in bf16 and adds in f32.
    WideSums,
    /// It travels and adds in bf16.
    NarrowSums,
    /// It is not rounded, but of other micro-batches: what chance makes of it.
    OtherBatch,
}

impl Cause {
    pub(super) const ALL: [Self; 3] = [Self::WideSums, Self::NarrowSums, Self::OtherBatch];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::WideSums => "f32 sums",
            Self::NarrowSums => "bf16 sums",
            Self::OtherBatch => "another batch",
        }
    }
}

/// Which weights a gradient is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weights {
    Initial,
    Trained,
}

impl Weights {
    pub(super) const ALL: [Self; 2] = [Self::Initial, Self::Trained];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Initial => "initial",
            Self::Trained => "trained",
        }
    }
}

/// Steps, and bits per byte after each.
pub(super) type Curve = Vec<(f64, f64)>;

impl Results {
    /// The curves of a setting, a seed each.
    pub(super) fn curves(&self, setting: Setting) -> Vec<Curve> {
        let runs = self.runs.iter().filter(|run| run.setting == setting);
        let point = |at: &Evaluation| (at.step as f64, at.bits_per_byte);
        runs.map(|run| run.evaluations.iter().map(point).collect()).collect()
    }

    /// The same, less the curve of `other` of the same seed.
    pub(super) fn gaps(&self, setting: Setting, other: Setting) -> Vec<Curve> {
        let pairs = self.curves(setting).into_iter().zip(self.curves(other));
        let gap = |((step, bits), (_, other)): (_, (_, f64))| (step, bits - other);
        pairs.map(|(curve, other)| curve.into_iter().zip(other).map(gap).collect()).collect()
    }

    /// The relative errors of these gradients, a seed each.
    pub(super) fn errors(&self, cause: Cause, window: usize, weights: Weights) -> Vec<f64> {
        let wanted = |error: &&GradError| {
            (error.cause, error.window, error.weights) == (cause, window, weights)
        };
        self.errors.iter().filter(wanted).map(|error| error.relative).collect()
    }

    /// The windows whose gradients were measured, from small to large.
    pub(super) fn windows(&self) -> Vec<usize> {
        let mut windows: Vec<_> = self.errors.iter().map(|error| error.window).collect();
        windows.sort_unstable();
        windows.dedup();
        windows
    }

    /// Every number, for programs.
    pub(super) fn csv(&self) -> String {
        let mut text = "measure,of,seed,at,value\n".to_owned();
        let mut line = |measure: &str, of: &str, seed: u64, at: usize, value: f64| {
            let words = format!("{measure},\"{of}\",{seed},{at},{value:.6e}");
            writeln!(text, "{words}").expect("a string takes every text");
        };
        for Run { seed, setting, evaluations } in &self.runs {
            for Evaluation { step, bits_per_byte, .. } in evaluations {
                line("loss by step", &setting.to_string(), *seed, *step, *bits_per_byte);
            }
        }
        for GradError { seed, cause, window, weights, relative } in &self.errors {
            let measure = format!("gradient by micro-batches; {} weights", weights.name());
            line(&measure, cause.name(), *seed, *window, *relative);
        }
        text
    }
}

/// The last point of each curve.
pub(super) fn ends(curves: &[Curve]) -> Vec<f64> {
    curves.iter().filter_map(|curve| Some(curve.last()?.1)).collect()
}

/// The mean; 0 of no numbers.
pub(super) fn mean(numbers: &[f64]) -> f64 {
    numbers.iter().sum::<f64>() / numbers.len().max(1) as f64
}

/// The mean of curves over the same steps.
pub(super) fn mean_curve(curves: &[Curve]) -> Curve {
    let steps = curves.first().into_iter().flatten().map(|(step, _)| *step).enumerate();
    let at = |index: usize| curves.iter().map(|curve| curve[index].1).collect::<Vec<_>>();
    steps.map(|(index, step)| (step, mean(&at(index)))).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Two seeds of two evaluations each: f32 sums lose 0.25 bits at the end, bf16 sums 0.5.
    pub(in super::super) fn sample() -> Results {
        let mut results = Results::default();
        for seed in [3, 5] {
            for (index, setting) in Setting::ALL.into_iter().enumerate() {
                let at =
                    |step, bits_per_byte| Evaluation { step, bits_per_byte, bigram_entropy: 0.0 };
                let evaluations = vec![at(0, 8.0), at(10, seed as f64 + 0.25 * index as f64)];
                results.runs.push(Run { seed, setting, evaluations });
            }
            for weights in Weights::ALL {
                let error =
                    |(cause, relative)| GradError { seed, cause, window: 64, weights, relative };
                let narrow = 0.002 * seed as f64;
                let relative = [0.001, narrow, 0.3];
                results.errors.extend(Cause::ALL.into_iter().zip(relative).map(error));
            }
        }
        results
    }

    #[test]
    fn gaps_are_taken_seed_by_seed_and_then_averaged() {
        let gaps = sample().gaps(Setting::NarrowSums, Setting::Oracle);
        assert_eq!(gaps, [[(0.0, 0.0), (10.0, 0.5)], [(0.0, 0.0), (10.0, 0.5)]]);
        assert_eq!(ends(&gaps), [0.5, 0.5]);
        let mean = mean_curve(&sample().curves(Setting::Oracle));
        assert_eq!(mean, [(0.0, 8.0), (10.0, 4.0)]);
    }

    #[test]
    fn every_number_is_a_row_of_five_cells() {
        let csv = sample().csv();
        assert_eq!(csv.lines().count(), 1 + 2 * 3 * 2 + 2 * 2 * 3);
        assert!(csv.lines().all(|row| row.replace(", ", " ").split(',').count() == 5), "{csv}");
        assert!(csv.contains("\nloss by step,\"bf16, f32 sums\",3,10,3.250000e0\n"), "{csv}");
    }
}
