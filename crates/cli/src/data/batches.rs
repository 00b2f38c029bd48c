//! Which sequences each rank sees, and when.

use oxizero_core::{Placement, Random, Rank, Stage, WorldSize};

/// The purpose of the batches' random draws.
const BATCH: u64 = u64::from_be_bytes(*b"batch   ");

/// Shares the one global order of micro-batches among the ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampler {
    /// Ranks.
    pub(crate) world_size: WorldSize,
    /// Micro-batches that a rank accumulates before a step.
    pub(crate) accumulation: usize,
    /// Decides who takes which micro-batch of a step.
    pub(crate) stage: Stage,
}

impl Sampler {
    /// The global index of the `micro_batch`-th of `rank` in `step`, all counted from 0.
    ///
    /// A rank takes neighbours where it adds locally before it reduces, and every `world_size`-th
    /// where each micro-batch is reduced at once; either way what is added first lies together.
    pub(crate) fn global_micro_batch(&self, step: usize, rank: Rank, micro_batch: usize) -> u64 {
        let ranks = self.world_size.get();
        let in_step = match self.stage.grads() {
            Placement::Sharded => micro_batch * ranks + rank.0,
            Placement::Partial | Placement::Replicated => rank.0 * self.accumulation + micro_batch,
        };
        (step * ranks * self.accumulation + in_step) as u64
    }
}

/// Draws training sequences: `context` bytes and the byte after each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batches<'a> {
    /// What to draw from; more than `context` bytes.
    pub(crate) text: &'a [u8],
    /// Bytes in a sequence.
    pub(crate) context: usize,
    /// Sequences in a micro-batch.
    pub(crate) micro_batch_size: usize,
    /// The run's seed.
    pub(crate) seed: u64,
}

impl<'a> Batches<'a> {
    /// The sequences of one micro-batch, `context + 1` bytes each, at uniformly random places.
    pub(crate) fn draw(&self, global_micro_batch: u64) -> Vec<&'a [u8]> {
        let mut random = Random::for_path(self.seed, &[BATCH, global_micro_batch]);
        let starts = self.text.len() - self.context;
        let sequence = |_| {
            let start = random.below(starts);
            &self.text[start..=start + self.context]
        };
        (0..self.micro_batch_size).map(sequence).collect()
    }
}

/// `count` micro-batches of sequences that lie evenly spread over `text`; no more than cover it.
pub(crate) fn evaluation_batches(
    text: &[u8],
    context: usize,
    micro_batch_size: usize,
    count: usize,
) -> Vec<Vec<&[u8]>> {
    let starts = text.len() - context;
    let cover = starts.div_ceil(context);
    let sequences = (count * micro_batch_size).min(cover);
    let sequence = |index: usize| {
        let start = index * starts / sequences;
        &text[start..=start + context]
    };
    let sequences: Vec<_> = (0..sequences).map(sequence).collect();
    sequences.chunks(micro_batch_size).map(<[_]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_every_micro_batch_of_a_step_once() {
        for stage in Stage::ALL {
            for (ranks, accumulation) in [(1, 1), (2, 3), (3, 2), (4, 4)] {
                let world_size = WorldSize::new(ranks).unwrap();
                let sampler = Sampler { world_size, accumulation, stage };
                let mut seen = Vec::new();
                for (step, rank) in
                    (0..2).flat_map(|step| world_size.ranks().map(move |r| (step, r)))
                {
                    let of = |micro| sampler.global_micro_batch(step, rank, micro);
                    seen.extend((0..accumulation).map(of));
                }
                seen.sort_unstable();
                assert_eq!(seen, (0..2 * (ranks * accumulation) as u64).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn ranks_that_add_locally_take_neighbours() {
        let of = |stage| {
            let world_size = WorldSize::new(2).unwrap();
            let sampler = Sampler { world_size, accumulation: 3, stage };
            [0, 1, 2].map(|micro| sampler.global_micro_batch(1, Rank(1), micro))
        };
        assert_eq!(of(Stage::Zero0), [9, 10, 11]);
        assert_eq!(of(Stage::Zero1), [9, 10, 11]);
        assert_eq!(of(Stage::Zero2), [7, 9, 11]);
        assert_eq!(of(Stage::Zero3), [7, 9, 11]);
    }

    #[test]
    fn draws_follow_seed_and_index_and_reach_both_ends() {
        let text: Vec<u8> = (0..20).collect();
        let batches = Batches { text: &text, context: 4, micro_batch_size: 8, seed: 1 };
        assert_eq!(batches.draw(5), batches.draw(5));
        assert_ne!(batches.draw(5), batches.draw(6));
        let starts: Vec<u8> = (0..50).flat_map(|n| batches.draw(n)).map(|s| s[0]).collect();
        assert_eq!((starts.iter().min(), starts.iter().max()), (Some(&0), Some(&15)));
    }

    #[test]
    fn evaluation_spreads_over_the_text_and_does_not_repeat() {
        let text: Vec<u8> = (0..200).collect();
        let batches = evaluation_batches(&text, 10, 4, 3);
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 4]);
        let starts: Vec<u8> = batches.concat().iter().map(|sequence| sequence[0]).collect();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 10), "{starts:?}");
        assert_eq!(evaluation_batches(&text, 10, 4, 1000).concat().len(), 19);
        assert_eq!(evaluation_batches(&text[..11], 10, 4, 2), [[&text[..11]]]);
    }
}
