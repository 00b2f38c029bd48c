//! Which sequences each rank sees, and when.

use oxizero_core::Random;

/// The purpose of the batches' random draws.
const BATCH: u64 = u64::from_be_bytes(*b"batch   ");

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
