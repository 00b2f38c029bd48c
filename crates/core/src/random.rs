//! A small seeded generator, for everything that must be drawn alike on every machine: initial
//! weights, dropout masks, samplers.

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
/// Not for secrets.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator whose draws depend on `seed` alone.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A generator for one purpose among many: its draws depend on `seed` and every number of
    /// `path`, such as (rank, micro-batch, segment).
    pub fn for_path(seed: u64, path: &[u64]) -> Self {
        let mix = |seed, part| Self::new(seed).next_u64() ^ Self::new(part).next_u64();
        Self::new(path.iter().fold(Self::new(seed).next_u64(), |seed, part| mix(seed, *part)))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `0..end`.
    ///
    /// # Panics
    ///
    /// If `end` is zero.
    pub fn below(&mut self, end: usize) -> usize {
        assert!(end > 0, "a draw from an empty range");
        // The high half of the product: biased by less than end / 2^64.
        ((u128::from(self.next_u64()) * end as u128) >> 64) as usize
    }

    /// Uniform in `[0, 1)`, a multiple of 2^-24.
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1_u64 << 24) as f32
    }

    /// Normal with mean 0 and variance 1 (Box and Muller's method, in f64, rounded once).
    pub fn normal(&mut self) -> f32 {
        let uniform = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        let (a, b) = (uniform(self.next_u64()), uniform(self.next_u64()));
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }

    /// Puts `items` into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_those_of_the_published_generator() {
        let mut random = Random::new(1234567);
        let draws = [random.next_u64(), random.next_u64(), random.next_u64()];
        assert_eq!(draws, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn paths_give_different_draws() {
        let mut seen: Vec<_> = [&[][..], &[0], &[1], &[0, 1], &[1, 0], &[0, 0]]
            .iter()
            .map(|path| Random::for_path(7, path).next_u64())
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 6);
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let mut random = Random::new(3);
        let draws: Vec<f32> = (0..100_000).map(|_| random.normal()).collect();
        let mean = draws.iter().sum::<f32>() / 1e5;
        let variance = draws.iter().map(|x| x * x).sum::<f32>() / 1e5;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<_> = (0..50).collect();
        Random::new(1).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
