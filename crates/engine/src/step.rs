//! How a window ends: from reduced gradients to a verdict that all ranks agree on.
//!
//! The types pass by value, `Reduced -> Unscaled -> consumed`, so that a gradient can be neither
//! unscaled twice nor applied unreduced. The elements stay in their buckets; these types carry what
//! is still to be done to them.

use oxizero_core::{ParamId, Rank};

use crate::groups::{Groups, Message};
use crate::{EngineError, Norm, written};

/// The reduced gradients of a window, still to be divided.
#[derive(Debug)]
pub(crate) struct Reduced {
    divisor: f32,
    non_finite: Option<(ParamId, Rank)>,
    used: Vec<bool>,
}

/// Gradients that an optimizer may use: each element divided by `divisor`, then multiplied by
/// `factor`.
#[derive(Debug)]
pub(crate) struct Unscaled {
    divisor: f32,
    factor: f32,
    used: Vec<bool>,
}

impl Reduced {
    /// Sums that are to be divided by `divisor`. `non_finite` is the first parameter and rank with
    /// a gradient that was not finite; `used` says by parameter whether any rank had one.
    pub(crate) fn new(divisor: f32, non_finite: Option<(ParamId, Rank)>, used: Vec<bool>) -> Self {
        Self { divisor, non_finite, used }
    }

    /// What each element is to be divided by.
    pub(crate) fn divisor(&self) -> f32 {
        self.divisor
    }

    /// The elements were divided where they lie, each rounded once.
    pub(crate) fn divided(&mut self) {
        self.divisor = 1.0;
    }

    /// Whether any rank used the parameter, or it was given a gradient.
    pub(crate) fn used(&self, param: ParamId) -> bool {
        self.used[param.0]
    }

    /// A parameter was given a gradient, whether any rank had used it or not.
    pub(crate) fn set(&mut self, param: ParamId) {
        self.used[param.0] = true;
    }

    /// The parameter and rank whose gradient made the sum of `owned` infinite or NaN; that itself
    /// where finite gradients overflowed, or an edit made it so.
    pub(crate) fn blame(&self, owned: (ParamId, Rank)) -> (ParamId, Rank) {
        self.non_finite.filter(|(param, _)| *param == owned.0).unwrap_or(owned)
    }

    /// Applies the clip factor that the agreed norm asks for.
    pub(crate) fn unscale(self, norm: f64, clip_norm: Option<f64>) -> Unscaled {
        let factor = match clip_norm {
            Some(max) if norm > max => (max / norm) as f32,
            _ => 1.0,
        };
        Unscaled { divisor: self.divisor, factor, used: self.used }
    }
}

impl Unscaled {
    /// What each element is divided by.
    pub(crate) fn divisor(&self) -> f32 {
        self.divisor
    }

    /// What each quotient is multiplied by.
    pub(crate) fn factor(&self) -> f32 {
        self.factor
    }

    /// By parameter: some rank used it in the window.
    pub(crate) fn used(&self) -> &[bool] {
        &self.used
    }
}

/// What `step` did.
#[derive(Clone, Debug, PartialEq)]
pub enum StepOutcome {
    /// The window goes on.
    Accumulated {
        /// Micro-batches in the window so far.
        n: usize,
        /// Micro-batches in a full window.
        of: usize,
    },
    /// The weights were updated.
    Applied {
        /// The global gradient norm, all parameters of all ranks, after edits and before
        /// clipping.
        norm_before: f64,
        /// The norm after clipping.
        norm_after: f64,
    },
    /// The weights, optimizer states and learning-rate schedule are as they were; the window's
    /// gradients are gone.
    Skipped {
        /// Why.
        reason: SkipReason,
        /// The first parameter that gave the reason.
        parameter: String,
        /// The lowest rank whose own gradient gave it, as it was stored; where finite ones
        /// overflowed on their way, in a sum or a cast of one, or an edit gave it, the rank that
        /// owns the element.
        rank: Rank,
    },
}

/// Why a step was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SkipReason {
    /// A gradient has an element that is infinite or not a number.
    NonFinite,
}

/// What one rank says about its part of the reduced gradients.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Report {
    /// This rank's part of the norm.
    pub(crate) norm_part: f64,
    /// The first parameter with an element in this rank's shards that is not finite.
    pub(crate) non_finite: Option<ParamId>,
    /// This rank cannot step, and returns its own error.
    pub(crate) refuses: bool,
    /// Tells its hyper-parameters from others.
    pub(crate) hyper: u64,
    /// By set of axes, tells its weights from those of others, as far as they are compared.
    pub(crate) weights: Vec<u64>,
}

/// What all ranks know after they exchanged reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) norm: f64,
    /// The first parameter whose reduced gradient is not finite, and who owns the element.
    pub(crate) non_finite: Option<(ParamId, Rank)>,
    /// Weights may not be alike on ranks that are to hold the same.
    pub(crate) weights_differ: bool,
}

impl Report {
    /// Exchanges reports with all ranks; every rank draws the same conclusion.
    pub(crate) fn agree(self, norm: Norm, groups: &Groups) -> Result<Verdict, EngineError> {
        let told = groups.exchange(Message::Report, "step", &self.to_bytes())?;
        let reports: Vec<Self> = told.iter().map(|bytes| Self::from_bytes(bytes)).collect();
        let ranked = || reports.iter().zip(groups.world().world_size().ranks());
        if let Some((_, rank)) = ranked().find(|(report, _)| report.refuses) {
            return Err(EngineError::PeerRefused { rank });
        }
        if let Some((_, rank)) = ranked().find(|(report, _)| report.hyper != reports[0].hyper) {
            return Err(EngineError::HyperDiffers { rank });
        }
        Ok(Verdict {
            norm: norm.of_parts(reports.iter().map(|report| report.norm_part)),
            non_finite: ranked().filter_map(|(report, at)| Some((report.non_finite?, at))).min(),
            weights_differ: written::differ(groups, |rank| &reports[rank.0].weights),
        })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [
            self.norm_part.to_bits(),
            self.non_finite.map_or(u64::MAX, |param| param.0 as u64),
            u64::from(self.refuses),
            self.hyper,
        ];
        numbers.iter().chain(&self.weights).flat_map(|number| number.to_le_bytes()).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let (numbers, _) = bytes.as_chunks();
        let mut numbers = numbers.iter().map(|bytes| u64::from_le_bytes(*bytes));
        let mut next = || numbers.next().expect("every rank tells as many numbers");
        let (norm_part, non_finite, refuses, hyper) = (next(), next(), next(), next());
        Self {
            norm_part: f64::from_bits(norm_part),
            non_finite: (non_finite != u64::MAX).then_some(ParamId(non_finite as usize)),
            refuses: refuses != 0,
            hyper,
            weights: numbers.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_the_wire() {
        for (non_finite, refuses) in [(None, false), (Some(ParamId(7)), true)] {
            let weights = vec![5, u64::MAX];
            let report = Report { norm_part: 0.1, non_finite, refuses, hyper: 1 << 63, weights };
            assert_eq!(Report::from_bytes(&report.to_bytes()), report);
        }
    }

    #[test]
    fn only_a_norm_above_the_limit_is_clipped() {
        let factor = |norm, clip| Reduced::new(6.0, None, vec![]).unscale(norm, clip).factor();
        assert_eq!(factor(5.0, Some(1.0)), 0.2);
        assert_eq!(factor(1.0, Some(1.0)), 1.0);
        assert_eq!(factor(5.0, None), 1.0);
    }
}
