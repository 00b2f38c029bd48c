//! How a window ends: from reduced gradients to a verdict that all ranks agree on.
//!
//! The types pass by value, `Reduced -> Unscaled -> consumed`, so that a gradient can be neither
//! unscaled twice nor applied unreduced. The elements stay in their buckets; these types carry what
//! is still to be done to them.

use oxizero_comm::Communicator;
use oxizero_core::{LossScale, ParamId, Rank};

use crate::options::Reduction;
use crate::{EngineError, Norm};

/// The reduced gradients of a window, still to be divided.
#[derive(Debug)]
pub(crate) struct Reduced {
    micro_batches: usize,
    divisor: f32,
}

/// Gradients that an optimizer may use: each element divided by `divisor`, then multiplied by
/// `factor`.
#[derive(Debug)]
pub(crate) struct Unscaled {
    divisor: f32,
    factor: f32,
}

impl Reduced {
    /// The sum over `world_size` ranks of `micro_batches` each, computed under `loss_scale`.
    pub(crate) fn new(
        micro_batches: usize,
        world_size: usize,
        loss_scale: LossScale,
        reduction: Reduction,
    ) -> Self {
        let count = match reduction {
            Reduction::Mean => micro_batches * world_size,
            Reduction::Sum => 1,
        };
        let divisor = (count as f64 * f64::from(loss_scale.get())) as f32;
        Self { micro_batches, divisor }
    }

    /// What each element is to be divided by.
    pub(crate) fn divisor(&self) -> f32 {
        self.divisor
    }

    /// Applies the clip factor that the agreed norm asks for.
    pub(crate) fn unscale(self, norm: f64, clip_norm: Option<f64>) -> Unscaled {
        let factor = match clip_norm {
            Some(max) if norm > max => (max / norm) as f32,
            _ => 1.0,
        };
        Unscaled { divisor: self.divisor, factor }
    }
}

impl Unscaled {
    pub(crate) fn divisor(&self) -> f32 {
        self.divisor
    }

    pub(crate) fn factor(&self) -> f32 {
        self.factor
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
        /// The global gradient norm, all parameters of all ranks.
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
        /// The lowest rank whose gradient of it was not finite; where finite gradients overflowed
        /// in their sum, the rank that owns the sum.
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

/// What one rank says about its part of a window.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Report {
    /// What the norm is made of, measured on this rank's shards.
    pub(crate) norm_part: f64,
    /// The first parameter with an element in this rank's shards whose sum is not finite.
    pub(crate) non_finite_sum: Option<ParamId>,
    /// The first parameter of which this rank's own gradient was not finite.
    pub(crate) non_finite_grad: Option<ParamId>,
    pub(crate) micro_batches: usize,
    /// This rank cannot step, and returns its own error.
    pub(crate) refuses: bool,
    /// By parameter: it contributed on this rank in this window.
    pub(crate) used: Vec<bool>,
}

/// What all ranks know after they exchanged reports.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) norm: f64,
    pub(crate) non_finite: Option<(ParamId, Rank)>,
    /// By parameter: some rank used it.
    pub(crate) used: Vec<bool>,
}

impl Report {
    /// Exchanges reports with all ranks; every rank draws the same conclusion.
    pub(crate) fn agree(self, norm: Norm, comm: &dyn Communicator) -> Result<Verdict, EngineError> {
        let reports: Vec<Self> = comm
            .exchange(&self.to_bytes())?
            .iter()
            .map(|bytes| Self::from_bytes(bytes, self.used.len()))
            .collect();
        for (report, rank) in reports.iter().zip(comm.world_size().ranks()) {
            if report.refuses {
                return Err(EngineError::PeerRefused { rank });
            }
            if report.micro_batches != self.micro_batches {
                let (expected, got) = (self.micro_batches, report.micro_batches);
                return Err(EngineError::MicroBatchesDiffer { rank, expected, got });
            }
        }
        // Where the sum is not finite, the rank whose gradient was not is told, if there is one:
        // else finite gradients overflowed, and it is the rank that owns the sum.
        let first = |of: fn(&Self) -> Option<ParamId>| {
            let ranked = reports.iter().zip(comm.world_size().ranks());
            ranked.filter_map(|(report, rank)| Some((of(report)?, rank))).min()
        };
        let non_finite = first(|report| report.non_finite_sum)
            .map(|sum| first(|report| report.non_finite_grad).unwrap_or(sum));
        let used = |param| reports.iter().any(|report| report.used[param]);
        Ok(Verdict {
            norm: norm.of_parts(reports.iter().map(|report| report.norm_part)),
            non_finite,
            used: (0..self.used.len()).map(used).collect(),
        })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let index = |param: Option<ParamId>| param.map_or(u64::MAX, |param| param.0 as u64);
        let numbers = [
            self.norm_part.to_bits(),
            index(self.non_finite_sum),
            index(self.non_finite_grad),
            self.micro_batches as u64,
            u64::from(self.refuses),
        ];
        let bits = self.used.chunks(8).map(|chunk| {
            chunk.iter().enumerate().fold(0, |byte, (bit, used)| byte | u8::from(*used) << bit)
        });
        numbers.iter().flat_map(|number| number.to_le_bytes()).chain(bits).collect()
    }

    fn from_bytes(bytes: &[u8], param_count: usize) -> Self {
        let (numbers, bits) = bytes.split_at(40);
        let number = |index: usize| {
            let bytes = &numbers[8 * index..8 * (index + 1)];
            u64::from_le_bytes(bytes.try_into().expect("a slice of eight bytes"))
        };
        let param = |index| (index != u64::MAX).then_some(ParamId(index as usize));
        Self {
            norm_part: f64::from_bits(number(0)),
            non_finite_sum: param(number(1)),
            non_finite_grad: param(number(2)),
            micro_batches: number(3) as usize,
            refuses: number(4) != 0,
            used: (0..param_count).map(|param| bits[param / 8] >> (param % 8) & 1 == 1).collect(),
        }
    }
}

impl Reduced {
    /// Micro-batches of the window.
    pub(crate) fn micro_batches(&self) -> usize {
        self.micro_batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_survive_the_wire() {
        for param_count in [0_usize, 1, 7, 8, 9, 64] {
            let report = Report {
                norm_part: 0.1,
                non_finite_sum: param_count.checked_sub(1).map(ParamId),
                non_finite_grad: param_count.checked_sub(8).map(ParamId),
                micro_batches: 3,
                refuses: param_count % 2 == 1,
                used: (0..param_count).map(|param| param % 3 == 0).collect(),
            };
            assert_eq!(Report::from_bytes(&report.to_bytes(), param_count), report);
        }
    }

    #[test]
    fn only_a_norm_above_the_limit_is_clipped() {
        let reduced = || Reduced::new(2, 3, LossScale::ONE, Reduction::Mean);
        assert_eq!(reduced().divisor(), 6.0);
        assert_eq!(reduced().unscale(5.0, Some(1.0)).factor(), 0.2);
        assert_eq!(reduced().unscale(1.0, Some(1.0)).factor(), 1.0);
        assert_eq!(reduced().unscale(5.0, None).factor(), 1.0);
    }

    #[test]
    fn the_loss_scale_divides_with_the_count() {
        let scale = LossScale::new(65536.0).unwrap();
        assert_eq!(Reduced::new(2, 2, scale, Reduction::Mean).divisor(), 4.0 * 65536.0);
        assert_eq!(Reduced::new(2, 2, scale, Reduction::Sum).divisor(), 65536.0);
    }
}
