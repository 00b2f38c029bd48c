//! The same global batch on another number of ranks.

use crate::{WorldSize, counted};

/// The samples that a step learns from, all ranks' together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalBatch {
    /// Samples of a step.
    pub samples: usize,
    /// Samples of one micro-batch of one rank.
    pub micro_batch: usize,
}

/// A global batch that ranks cannot share in equal micro-batches.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a global batch of {} does not divide into micro-batches of {micro_batch} on {}; {}",
    counted(*samples, "sample"),
    counted(*ranks, "rank"),
    self.nearest()
)]
pub struct Indivisible {
    /// Samples of a step.
    pub samples: usize,
    /// Samples of one micro-batch of one rank.
    pub micro_batch: usize,
    /// The ranks.
    pub ranks: usize,
    /// Numbers of ranks that divide it, ascending: the four nearest below, and above.
    pub possible_ranks: Vec<usize>,
    /// The largest batch below that these ranks divide, and the smallest above; of both, those that
    /// are at least one sample.
    pub nearest_samples: (Option<usize>, Option<usize>),
}

impl GlobalBatch {
    /// The micro-batches that each of so many ranks accumulates for a step of this batch. `ranks`
    /// are those that work on micro-batches of their own.
    ///
    /// # Errors
    ///
    /// If they are no whole number of at least one; the error names the nearest that are.
    pub fn accumulation(self, ranks: WorldSize) -> Result<usize, Indivisible> {
        let Self { samples, micro_batch } = self;
        let ranks = ranks.get();
        let divides = |ranks: usize| {
            let together = micro_batch.checked_mul(ranks).filter(|together| *together > 0)?;
            (samples > 0 && samples.is_multiple_of(together)).then(|| samples / together)
        };
        if let Some(accumulation) = divides(ranks) {
            return Ok(accumulation);
        }
        let is_right = |ranks: &usize| divides(*ranks).is_some();
        // More ranks than micro-batches divide nothing.
        let most = samples.checked_div(micro_batch).unwrap_or(0);
        let below = (1..ranks.min(most + 1)).rev().filter(is_right).take(NEAR);
        let mut possible_ranks: Vec<_> = below.collect();
        possible_ranks.reverse();
        possible_ranks.extend((ranks + 1..=most).filter(is_right).take(NEAR));
        let together = micro_batch.checked_mul(ranks).filter(|together| *together > 0);
        let less = together.map(|together| samples / together * together);
        let more = together.and_then(|together| less?.checked_add(together));
        Err(Indivisible {
            samples,
            micro_batch,
            ranks,
            possible_ranks,
            nearest_samples: (less.filter(|less| *less > 0), more),
        })
    }
}

impl Indivisible {
    fn nearest(&self) -> String {
        let (below, above) = self.nearest_samples;
        let samples: Vec<_> = below.into_iter().chain(above).collect();
        let same = any_of(&self.possible_ranks, "rank");
        let same = same.map(|ranks| format!("the same batch on {ranks}"));
        let other = any_of(&samples, "sample");
        let own = counted(self.ranks, "rank");
        let other = other.map(|samples| format!("a batch of {samples} on {own}"));
        let ways: Vec<_> = same.into_iter().chain(other).collect();
        match ways.is_empty() {
            true => "a micro-batch has at least one sample".into(),
            false => format!("what works is {}", ways.join(", or ")),
        }
    }
}

/// Numbers of ranks below, and above, that an error names at most.
const NEAR: usize = 4;

/// `1, 2 or 4 ranks`, if there is any.
fn any_of(counts: &[usize], noun: &str) -> Option<String> {
    let (last, others) = counts.split_last()?;
    let others: Vec<_> = others.iter().map(usize::to_string).collect();
    let last = counted(*last, noun);
    Some(if others.is_empty() { last } else { format!("{} or {last}", others.join(", ")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accumulation(
        samples: usize,
        micro_batch: usize,
        ranks: usize,
    ) -> Result<usize, Indivisible> {
        GlobalBatch { samples, micro_batch }.accumulation(WorldSize::new(ranks).unwrap())
    }

    #[test]
    fn the_global_batch_is_kept_on_every_world_that_divides_it() {
        for (ranks, expected) in [(1, 24), (2, 12), (3, 8), (4, 6), (6, 4), (8, 3), (24, 1)] {
            assert_eq!(accumulation(48, 2, ranks), Ok(expected));
        }
    }

    #[test]
    fn a_world_that_does_not_divide_it_hears_of_the_nearest_that_do() {
        let refused = accumulation(48, 2, 5).unwrap_err();
        assert_eq!(refused.possible_ranks, [1, 2, 3, 4, 6, 8, 12, 24]);
        assert_eq!(refused.nearest_samples, (Some(40), Some(50)));
        let text = refused.to_string();
        let ways = "; what works is the same batch on 1, 2, 3, 4, 6, 8, 12 or 24 ranks, or a \
                    batch of 40 or 50 samples on 5 ranks";
        assert!(text.ends_with(ways), "{text}");
        let text = accumulation(16, 8, 3).unwrap_err().to_string();
        let expected = "a global batch of 16 samples does not divide into micro-batches of 8 on 3 \
                        ranks; what works is the same batch on 1 or 2 ranks, or a batch of 24 \
                        samples on 3 ranks";
        assert_eq!(text, expected);
        let refused = accumulation(48, 2, 30).unwrap_err();
        assert_eq!(refused.possible_ranks, [6, 8, 12, 24]);
        assert_eq!(refused.nearest_samples, (None, Some(60)));
    }

    #[test]
    fn what_no_world_divides_is_refused() {
        let refused = accumulation(7, 2, 1).unwrap_err();
        assert_eq!(refused.possible_ranks, [0; 0]);
        assert!(
            refused.to_string().ends_with("; what works is a batch of 6 or 8 samples on 1 rank")
        );
        assert!(accumulation(0, 1, 1).is_err());
        assert!(accumulation(4, 0, 2).unwrap_err().to_string().contains("at least one sample"));
        assert!(accumulation(usize::MAX, usize::MAX, 2).is_err());
    }
}
