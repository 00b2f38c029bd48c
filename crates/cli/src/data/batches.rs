//! Which sequences each rank sees, and when.

use oxizero_core::Random;

/// The purpose of the batches' random draws.
const BATCH: u64 = u64::from_be_bytes(*b"batch   ");

/// Text as a model reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Text<'a> {
    /// Every byte is a token.
    Bytes(&'a [u8]),
    /// What a tokenizer made of it.
    Tokens(&'a [u32]),
}

impl Text<'_> {
    /// Tokens.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Tokens(tokens) => tokens.len(),
        }
    }

    /// `count` tokens from `start` on.
    pub(crate) fn sequence(self, start: usize, count: usize) -> Vec<u32> {
        match self {
            Self::Bytes(bytes) => {
                bytes[start..start + count].iter().map(|byte| u32::from(*byte)).collect()
            }
            Self::Tokens(tokens) => tokens[start..start + count].to_vec(),
        }
    }
}

/// Draws training sequences: `context` tokens and the token after each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batches<'a> {
    /// What to draw from; more than `context` tokens.
    pub(crate) text: Text<'a>,
    /// Tokens in a sequence.
    pub(crate) context: usize,
    /// Sequences in a micro-batch.
    pub(crate) micro_batch_size: usize,
    /// The run's seed.
    pub(crate) seed: u64,
}

impl Batches<'_> {
    /// The sequences of one micro-batch, `context + 1` tokens each, at uniformly random places.
    pub(crate) fn draw(&self, global_micro_batch: u64) -> Vec<Vec<u32>> {
        let mut random = Random::for_path(self.seed, &[BATCH, global_micro_batch]);
        let starts = self.text.len() - self.context;
        let sequence = |_| self.text.sequence(random.below(starts), self.context + 1);
        (0..self.micro_batch_size).map(sequence).collect()
    }
}

/// `count` micro-batches of sequences that lie evenly spread over `text`; no more than cover it.
pub(crate) fn evaluation_batches(
    text: Text<'_>,
    context: usize,
    micro_batch_size: usize,
    count: usize,
) -> Vec<Vec<Vec<u32>>> {
    let starts = text.len() - context;
    let cover = starts.div_ceil(context);
    let sequences = (count * micro_batch_size).min(cover);
    let sequence = |index: usize| text.sequence(index * starts / sequences, context + 1);
    let sequences: Vec<_> = (0..sequences).map(sequence).collect();
    sequences.chunks(micro_batch_size).map(<[_]>::to_vec).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_seed_and_index_and_reach_both_ends() {
        let text: Vec<u8> = (0..20).collect();
        let text = Text::Bytes(&text);
        let batches = Batches { text, context: 4, micro_batch_size: 8, seed: 1 };
        assert_eq!(batches.draw(5), batches.draw(5));
        assert_ne!(batches.draw(5), batches.draw(6));
        let starts: Vec<u32> = (0..50).flat_map(|n| batches.draw(n)).map(|s| s[0]).collect();
        assert_eq!((starts.iter().min(), starts.iter().max()), (Some(&0), Some(&15)));
    }

    #[test]
    fn tokens_are_drawn_as_bytes_are() {
        let bytes: Vec<u8> = (0..50).collect();
        let tokens: Vec<u32> = (0..50).map(|n| n + 70_000).collect();
        let draw = |text| Batches { text, context: 4, micro_batch_size: 8, seed: 1 }.draw(3);
        let drawn_bytes = draw(Text::Bytes(&bytes)).concat();
        let shifted: Vec<_> = drawn_bytes.iter().map(|n| n + 70_000).collect();
        let drawn: Vec<u32> = draw(Text::Tokens(&tokens)).concat();
        assert_eq!(drawn, shifted);
    }

    #[test]
    fn evaluation_spreads_over_the_text_and_does_not_repeat() {
        let bytes: Vec<u8> = (0..200).collect();
        let text = Text::Bytes(&bytes);
        let batches = evaluation_batches(text, 10, 4, 3);
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4, 4]);
        let starts: Vec<u32> = batches.concat().iter().map(|sequence| sequence[0]).collect();
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= 10), "{starts:?}");
        assert_eq!(evaluation_batches(text, 10, 4, 1000).concat().len(), 19);
        let all: Vec<u32> = (0..11).collect();
        assert_eq!(evaluation_batches(Text::Bytes(&bytes[..11]), 10, 4, 2), [[all]]);
    }
}
