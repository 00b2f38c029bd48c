//! Gradients whose means over ranks are known, and exact in every dtype.
//!
//! The elements are small whole numbers: one drawn for the element, and one for rank and round, so
//! that no two ranks and no two rounds that follow each other have the same.

use oxizero::GradView;
use oxizero_core::{DType, Numel, Random, Rank, WorldSize};
use oxizero_device::{Buffer, kernels};

/// What every parameter's gradient is a part of.
#[derive(Debug)]
pub(crate) struct Known {
    drawn: Vec<f32>,
}

/// The gradients of one rank in one round.
#[derive(Debug)]
pub(crate) struct Given {
    values: Buffer,
}

/// bf16 holds whole numbers up to 256: the drawn part is below 64, and so are the others.
const END: usize = 64;
/// Where the parameters' gradients start, so far apart: no two are alike.
const APART: usize = 7;

impl Known {
    /// For so many parameters of at most so many elements.
    pub(crate) fn new(params: usize, numel_max: usize) -> Self {
        let mut random = Random::new(1);
        let mut next = || random.below(END) as f32;
        Self { drawn: (0..numel_max + APART * params).map(|_| next()).collect() }
    }

    /// What `rank` gives.
    pub(crate) fn given(&self, rank: Rank, round: usize, dtype: DType) -> Given {
        let more = ((rank.0 % END) + round % END) as f32;
        let values: Vec<f32> = self.drawn.iter().map(|drawn| drawn + more).collect();
        let mut given = Buffer::heap(Numel(values.len()), dtype);
        kernels::cast(GradView::F32(&values), given.view_mut());
        Given { values: given }
    }

    /// Whether `values` are the mean over all ranks of what they gave for parameter `param`.
    pub(crate) fn is_mean(
        &self,
        values: GradView<'_>,
        param: usize,
        world_size: WorldSize,
        round: usize,
    ) -> bool {
        let GradView::F32(values) = values else { return false };
        let ranks: usize = world_size.ranks().map(|rank| rank.0 % END).sum();
        let more = ranks as f32 / world_size.get() as f32 + (round % END) as f32;
        let drawn = &self.drawn[APART * param..APART * param + values.len()];
        values.iter().zip(drawn).all(|(value, drawn)| *value == drawn + more)
    }
}

impl Given {
    /// The gradient of parameter `param`, of so many elements.
    pub(crate) fn of(&self, param: usize, numel: Numel) -> GradView<'_> {
        self.values.range(APART * param..APART * param + numel.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_mean_of_the_round_and_the_parameter_is_the_mean() {
        let known = Known::new(3, 50);
        let world_size = WorldSize::new(2).unwrap();
        for dtype in [DType::F32, DType::Bf16] {
            let of = |rank, param| {
                let given = known.given(Rank(rank), 63, dtype);
                let mut wide = vec![0.0; 50];
                kernels::cast(given.of(param, Numel(50)), oxizero_device::ViewMut::F32(&mut wide));
                wide
            };
            let mean = |param| {
                let pairs = of(0, param).into_iter().zip(of(1, param));
                pairs.map(|(a, b)| (a + b) / 2.0).collect::<Vec<_>>()
            };
            for param in 0..3 {
                let values = mean(param);
                let is_mean = |values: &[f32], param, round| {
                    known.is_mean(GradView::F32(values), param, world_size, round)
                };
                assert!(is_mean(&values, param, 63));
                assert!(!is_mean(&values, (param + 1) % 3, 63));
                assert!(!is_mean(&values, param, 62));
                assert!(!is_mean(&of(0, param), param, 63));
                let mut changed = values.clone();
                changed[49] += 0.5;
                assert!(!is_mean(&changed, param, 63));
            }
        }
    }
}
