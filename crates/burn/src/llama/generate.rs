//! A sample of text, token by token.

use burn::tensor::{Device, Int, Tensor, TensorData};
use oxizero_core::Random;

use super::Tokens;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Seeds the draws.
    pub seed: u64,
}

/// Lengthens `tokens` (not empty) by `count`, looking back at most `context` of them.
///
/// `logits` runs the model without targets on one sequence. It is run whole for each token:
/// enough for a short sample. All ranks that share weights must make the same calls.
pub fn generate<E>(
    tokens: &mut Vec<usize>,
    count: usize,
    context: usize,
    sampling: Sampling,
    device: &Device,
    mut logits: impl FnMut(&Tokens) -> Result<Tensor<3>, E>,
) -> Result<(), E> {
    assert!(!tokens.is_empty(), "a sample starts from at least one token");
    let mut random = Random::new(sampling.seed);
    for _ in 0..count {
        let seen = &tokens[tokens.len().saturating_sub(context)..];
        let logits = logits(&sequence(seen, device))?;
        let [_, positions, vocab_size] = logits.dims();
        let last = logits.narrow(1, positions - 1, 1).reshape([vocab_size]);
        tokens.push(choose(last, sampling.temperature, &mut random));
    }
    Ok(())
}

fn sequence(tokens: &[usize], device: &Device) -> Tokens {
    let ids: Vec<i64> = tokens.iter().map(|token| *token as i64).collect();
    let data = TensorData::new(ids, [1, tokens.len()]);
    Tokens { tokens: Tensor::<2, Int>::from_data(data, device), targets: None }
}

fn choose(logits: Tensor<1>, temperature: f32, random: &mut Random) -> usize {
    let logits: Vec<f32> = logits.into_data().try_into_vec().expect("logits are f32");
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    let (best, max) = best.map(|(index, max)| (index, *max)).expect("the vocabulary is not empty");
    if temperature == 0.0 {
        return best;
    }
    let weights: Vec<f32> = logits.iter().map(|x| ((x - max) / temperature).exp()).collect();
    let mut left = random.uniform() * weights.iter().sum::<f32>();
    let place = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    place.unwrap_or(best)
}
