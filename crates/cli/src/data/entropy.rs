//! Bits per byte.

/// The conditional entropy of a byte given the one before it, in bits, with the probabilities of
/// `text` itself (a plug-in estimate): what the best possible bigram table would score on it.
pub(crate) fn bigram_entropy(text: &[u8]) -> f64 {
    let mut counts = vec![0_u64; 256 * 256];
    for pair in text.windows(2) {
        counts[usize::from(pair[0]) * 256 + usize::from(pair[1])] += 1;
    }
    let mut bits = 0.0;
    for row in counts.chunks(256) {
        let total = row.iter().sum::<u64>() as f64;
        let seen = row.iter().filter(|count| **count > 0).map(|count| *count as f64);
        bits += seen.map(|count| count * (total / count).log2()).sum::<f64>();
    }
    bits / text.len().saturating_sub(1).max(1) as f64
}

/// Bits per byte of a mean cross-entropy in nats per byte.
pub(crate) fn bits_per_byte(nats: f64) -> f64 {
    nats / std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_that_follows_from_the_last_has_no_entropy() {
        assert_eq!(bigram_entropy(b"abababab"), 0.0);
        assert_eq!(bigram_entropy(b""), 0.0);
        assert_eq!(bigram_entropy(b"a"), 0.0);
    }

    #[test]
    fn two_equally_likely_successors_are_one_bit() {
        // After `a` come `b` and `c` twice each; after those, always `a`.
        assert_eq!(bigram_entropy(b"abacabaca"), 0.5);
    }

    #[test]
    fn a_uniform_guess_over_bytes_is_eight_bits() {
        assert!((bits_per_byte(256_f64.ln()) - 8.0).abs() < 1e-12);
    }
}
