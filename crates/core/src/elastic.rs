//! The same global batch on another number of ranks.

use crate::WorldSize;

/// The samples that a step learns from, all ranks' together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalBatch {
    /// Samples of a step.
    pub samples: usize,
    /// Samples of one micro-batch of one rank.
    pub micro_batch: usize,
}

/// A global batch that ranks cannot share in equal micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a global batch of {samples} samples does not divide into micro-batches of {micro_batch} on \
     {ranks} ranks; {}",
    self.nearest()
)]
pub struct Indivisible {
    /// Samples of a step.
    pub samples: usize,
    /// Samples of one micro-batch of one rank.
    pub micro_batch: usize,
    /// The ranks.
    pub ranks: usize,
    /// The most ranks below that divide it, and the fewest above.
    pub nearest_ranks: (Option<usize>, Option<usize>),
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
        let below = (1..ranks.min(most + 1)).rev().find(is_right);
        let above = (ranks + 1..=most).find(is_right);
        let together = micro_batch.checked_mul(ranks).filter(|together| *together > 0);
        let less = together.map(|together| samples / together * together);
        let more = together.and_then(|together| less?.checked_add(together));
        Err(Indivisible {
            samples,
            micro_batch,
            ranks,
            nearest_ranks: (below, above),
            nearest_samples: (less.filter(|less| *less > 0), more),
        })
    }
}

impl Indivisible {
    fn nearest(&self) -> String {
        let either = |pair: (Option<usize>, Option<usize>), what: &str| {
            let known: Vec<_> = [pair.0, pair.1].iter().flatten().map(usize::to_string).collect();
            let text = format!("{} {what}", known.join(" or "));
            (!known.is_empty()).then_some(text)
        };
        let ranks = either(self.nearest_ranks, "ranks");
        let samples = either(self.nearest_samples, "samples");
        let ways: Vec<_> = ranks.into_iter().chain(samples).collect();
        match ways.is_empty() {
            true => "a micro-batch has at least one sample".into(),
            false => format!("possible are {}", ways.join(", or ")),
        }
    }
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
        assert_eq!(refused.nearest_ranks, (Some(4), Some(6)));
        assert_eq!(refused.nearest_samples, (Some(40), Some(50)));
        let text = refused.to_string();
        assert!(text.ends_with("possible are 4 or 6 ranks, or 40 or 50 samples"), "{text}");
        let refused = accumulation(48, 2, 30).unwrap_err();
        assert_eq!(refused.nearest_ranks, (Some(24), None));
        assert_eq!(refused.nearest_samples, (None, Some(60)));
    }

    #[test]
    fn what_no_world_divides_is_refused() {
        assert_eq!(accumulation(7, 2, 1).unwrap_err().nearest_ranks, (None, None));
        assert!(accumulation(0, 1, 1).is_err());
        assert!(accumulation(4, 0, 2).unwrap_err().to_string().contains("at least one sample"));
        assert!(accumulation(usize::MAX, usize::MAX, 2).is_err());
    }
}
