//! The accumulation window: what this rank collected, and what all ranks say of it together.

use oxizero_core::{ConfigError, LossScale, ParamId, ParamSpec, Rank, Sharing};

use crate::EngineError;
use crate::groups::{Groups, Message, differing};
use crate::options::Reduction;
use crate::step::Reduced;

/// The accumulation window on this rank.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) state: WindowState,
    /// Backward passes that have ended, and whose gradients this rank still holds.
    pub(crate) passes: usize,
    /// Backward passes that have ended, all of them.
    pub(crate) backwards: usize,
    /// Where the micro-batch is.
    pub(crate) micro_batch: MicroBatch,
    /// What the window's gradients were multiplied by; `None` before the first.
    pub(crate) loss_scale: Option<LossScale>,
    /// The sum of the weights of its micro-batches.
    pub(crate) weight: f64,
}

#[derive(Debug)]
pub(crate) enum WindowState {
    Empty,
    /// So many micro-batches have ended with a step.
    Accumulating(usize),
    Reduced(Reduced),
    Consumed,
}

/// Where a micro-batch is. It ends with a step, whatever the number of its backward passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MicroBatch {
    /// No backward pass has ended, or one has begun since.
    Open,
    /// A backward pass has ended, and none has begun since.
    BackwardEnded,
}

impl Window {
    pub(crate) fn new(state: WindowState) -> Self {
        let micro_batch = MicroBatch::Open;
        Self { state, passes: 0, backwards: 0, micro_batch, loss_scale: None, weight: 0.0 }
    }

    /// The micro-batches that have ended with a step; `None` once gradients are reduced.
    pub(crate) fn ended(&self) -> Option<usize> {
        match self.state {
            WindowState::Empty | WindowState::Consumed => Some(0),
            WindowState::Accumulating(n) => Some(n),
            WindowState::Reduced(_) => None,
        }
    }
}

/// What one rank says of its window before gradients are divided.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Collected {
    /// The rank does not take the step, and returns its own error.
    pub(crate) refuses: bool,
    pub(crate) micro_batches: usize,
    /// Passes whose gradients the rank still holds.
    pub(crate) passes: usize,
    /// Passes in all.
    pub(crate) backwards: usize,
    pub(crate) loss_scale: Option<LossScale>,
    pub(crate) weight: f64,
    /// The first parameter with a gradient on this rank that is not finite.
    pub(crate) non_finite: Option<ParamId>,
    /// By parameter: it had a gradient on this rank.
    pub(crate) used: Vec<bool>,
}

/// What all ranks know of a window after they told each other.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Agreed {
    micro_batches: usize,
    /// The most backward passes of a rank.
    passes: usize,
    loss_scale: LossScale,
    weight: f64,
    non_finite: Option<(ParamId, Rank)>,
    used: Vec<bool>,
}

impl Collected {
    /// Tells all ranks, in the call of that name; every rank draws the same conclusion, but for the
    /// use of parameters that are not the same on all. `params` says how each parameter is shared.
    pub(crate) fn agree(
        self,
        call: &str,
        groups: &Groups,
        params: &[(&ParamSpec, Sharing)],
    ) -> Result<Agreed, EngineError> {
        let told = groups.exchange(Message::Window, call, &self.to_bytes())?;
        let all: Vec<Self> =
            told.iter().map(|bytes| Self::from_bytes(bytes, self.used.len())).collect();
        let ranks = || all.iter().zip((0..).map(Rank));
        if let Some((_, rank)) = ranks().find(|(collected, _)| collected.refuses) {
            return Err(EngineError::PeerRefused { rank });
        }
        let first_of = groups.same_batches();
        for (collected, at) in ranks() {
            let first = first_of[at.0];
            collected.check_same_batches(at, &all[first.0], first)?;
        }
        check_replicas(&all, groups, params)?;
        let counted = || ranks().filter(|(_, at)| first_of[at.0] == *at).map(|(rank, _)| rank);
        let used = |(param, (_, sharing)): (usize, &(&ParamSpec, Sharing))| {
            groups.holders(*sharing).iter().any(|at| all[at.0].used[param])
        };
        Ok(Agreed {
            micro_batches: counted().map(|rank| rank.micro_batches).sum(),
            passes: all.iter().map(|rank| rank.passes).max().unwrap_or(0),
            loss_scale: one_scale(ranks())?,
            weight: counted().map(|rank| rank.weight).sum(),
            non_finite: ranks().filter_map(|(rank, at)| Some((rank.non_finite?, at))).min(),
            used: params.iter().enumerate().map(used).collect(),
        })
    }

    /// Refuses a rank `at` that did not work on the micro-batches that rank `first` worked on.
    fn check_same_batches(&self, at: Rank, other: &Self, first: Rank) -> Result<(), EngineError> {
        let said = |of: &Self| (of.micro_batches, of.backwards, of.weight);
        if said(self) == said(other) {
            return Ok(());
        }
        let text = |of: &Self| {
            let passes = format!("{} micro-batches of {} passes", of.micro_batches, of.backwards);
            if of.weight == 0.0 { passes } else { format!("{passes} and weight {}", of.weight) }
        };
        let (expected, got) = (text(other), text(self));
        Err(EngineError::BatchesDiffer { first, expected, second: at, got })
    }

    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [
            u64::from(self.refuses),
            self.micro_batches as u64,
            self.passes as u64,
            self.backwards as u64,
            // No scale is 0, which is none's bits.
            self.loss_scale.map_or(0, |scale| u64::from(scale.get().to_bits())),
            self.weight.to_bits(),
            self.non_finite.map_or(u64::MAX, |param| param.0 as u64),
        ];
        let bits = self.used.chunks(8).map(|chunk| {
            chunk.iter().enumerate().fold(0, |byte, (bit, used)| byte | u8::from(*used) << bit)
        });
        numbers.iter().flat_map(|number| number.to_le_bytes()).chain(bits).collect()
    }

    fn from_bytes(bytes: &[u8], param_count: usize) -> Self {
        let (numbers, bits) = bytes.split_at(56);
        let number = |index: usize| {
            let bytes = &numbers[8 * index..8 * (index + 1)];
            u64::from_le_bytes(bytes.try_into().expect("a slice of eight bytes"))
        };
        let non_finite = number(6);
        Self {
            refuses: number(0) != 0,
            micro_batches: number(1) as usize,
            passes: number(2) as usize,
            backwards: number(3) as usize,
            loss_scale: LossScale::new(f32::from_bits(number(4) as u32)).ok(),
            weight: f64::from_bits(number(5)),
            non_finite: (non_finite != u64::MAX).then_some(ParamId(non_finite as usize)),
            used: (0..param_count).map(|param| bits[param / 8] >> (param % 8) & 1 == 1).collect(),
        }
    }
}

/// Refuses parameters that some of the ranks used which are to have the same gradient of them.
fn check_replicas(
    all: &[Collected],
    groups: &Groups,
    params: &[(&ParamSpec, Sharing)],
) -> Result<(), EngineError> {
    let replicated = |(_, (_, sharing)): &(usize, &(_, Sharing))| !sharing.replicated.is_empty();
    for (index, (spec, sharing)) in params.iter().enumerate().filter(replicated) {
        let uses = |rank: Rank| all[rank.0].used[index];
        if let Some((first, second)) = differing(groups.same_gradient(*sharing), uses) {
            return Err(EngineError::ReplicasDiffer { param: spec.name.clone(), first, second });
        }
    }
    Ok(())
}

/// The scale of all gradients; a rank without gradients takes the others'.
fn one_scale<'a>(
    ranks: impl Iterator<Item = (&'a Collected, Rank)>,
) -> Result<LossScale, EngineError> {
    let mut scales = ranks.filter_map(|(rank, at)| Some((rank.loss_scale?, at)));
    let Some((scale, first)) = scales.next() else { return Ok(LossScale::ONE) };
    match scales.find(|(other, _)| *other != scale) {
        Some((other, second)) => {
            let (expected, got) = (scale.get(), other.get());
            Err(EngineError::LossScalesDiffer { first, expected, second, got })
        }
        None => Ok(scale),
    }
}

impl Agreed {
    /// The most backward passes that a rank's gradients are summed over.
    pub(crate) fn passes(&self) -> usize {
        self.passes
    }

    /// The reduced window, with what its gradients are to be divided by.
    pub(crate) fn reduced(self, reduction: Reduction) -> Result<Reduced, EngineError> {
        let count = match reduction {
            Reduction::Mean => self.micro_batches as f64,
            Reduction::Sum => 1.0,
            Reduction::Weighted if self.weight == 0.0 => return Err(EngineError::NoWeight),
            Reduction::Weighted => self.weight,
        };
        let divisor = (count * f64::from(self.loss_scale.get())) as f32;
        if !divisor.is_normal() {
            let scale = self.loss_scale.get();
            let (field, value, other) = match (count as f32).is_normal() {
                true => ("loss_scale", scale.to_string(), format!("the divisor {count}")),
                false => ("weight", count.to_string(), format!("the loss scale {scale}")),
            };
            let allowed = format!("one whose product with {other} is an f32");
            return Err(EngineError::Config(ConfigError::Value {
                field: field.into(),
                value,
                allowed,
            }));
        }
        Ok(Reduced::new(divisor, self.non_finite, self.used))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_collected_survives_the_wire() {
        for param_count in [0_usize, 1, 7, 8, 9, 64] {
            let collected = Collected {
                refuses: param_count == 7,
                micro_batches: 3,
                passes: 4,
                backwards: 5,
                loss_scale: LossScale::new(0.5 + param_count as f32).ok(),
                weight: 0.1,
                non_finite: param_count.checked_sub(8).map(ParamId),
                used: (0..param_count).map(|param| param % 3 == 0).collect(),
            };
            assert_eq!(Collected::from_bytes(&collected.to_bytes(), param_count), collected);
        }
    }

    fn agreed(loss_scale: f32, weight: f64) -> Agreed {
        Agreed {
            micro_batches: 6,
            passes: 2,
            loss_scale: LossScale::new(loss_scale).unwrap(),
            weight,
            non_finite: None,
            used: vec![],
        }
    }

    #[test]
    fn the_divisor_is_count_or_weight_times_the_loss_scale() {
        let divisor = |agreed: Agreed, reduction| agreed.reduced(reduction).unwrap().divisor();
        assert_eq!(divisor(agreed(1.0, 0.0), Reduction::Mean), 6.0);
        assert_eq!(divisor(agreed(65536.0, 0.0), Reduction::Mean), 6.0 * 65536.0);
        assert_eq!(divisor(agreed(65536.0, 0.0), Reduction::Sum), 65536.0);
        assert_eq!(divisor(agreed(2.0, 2.5), Reduction::Weighted), 5.0);
    }

    #[test]
    fn a_divisor_that_is_no_number_is_refused() {
        assert!(agreed(f32::MAX, 0.0).reduced(Reduction::Mean).is_err());
        assert!(agreed(1e-42, 0.0).reduced(Reduction::Sum).is_err());
        assert!(matches!(
            agreed(1.0, 0.0).reduced(Reduction::Weighted),
            Err(EngineError::NoWeight)
        ));
    }

    #[test]
    fn scales_that_differ_name_both_ranks() {
        let rank = |scale: Option<f32>| Collected {
            refuses: false,
            micro_batches: 1,
            passes: 1,
            backwards: 1,
            loss_scale: scale.and_then(|scale| LossScale::new(scale).ok()),
            weight: 0.0,
            non_finite: None,
            used: vec![],
        };
        let all = [rank(None), rank(Some(8.0)), rank(None), rank(Some(4.0))];
        let ranked = |count: usize| all.iter().take(count).zip((0..).map(Rank));
        assert_eq!(one_scale(ranked(1)).unwrap(), LossScale::ONE);
        assert_eq!(one_scale(ranked(3)).unwrap().get(), 8.0);
        let error = one_scale(ranked(4)).unwrap_err();
        assert!(matches!(
            error,
            EngineError::LossScalesDiffer { first: Rank(1), second: Rank(3), .. }
        ));
    }
}
