//! Which rank works on which micro-batch of the global batch.

use oxizero_core::{Placement, Rank, Stage, WorldSize};

/// Shares the one global order of micro-batches among the ranks.
///
/// In a mesh whose ranks work partly on the same micro-batches, what counts is
/// [`Engine::batch_rank`](crate::Engine::batch_rank) of
/// [`Engine::batch_ranks`](crate::Engine::batch_ranks).
#[derive(Clone, Copy, Debug)]
pub struct Sampler {
    /// Ranks.
    pub world_size: WorldSize,
    /// Micro-batches that a rank accumulates before a step.
    pub accumulation: usize,
    /// Decides who takes which micro-batch of a step.
    pub stage: Stage,
}

impl Sampler {
    /// The global index of the `micro_batch`-th of `rank` in `step`, all counted from 0.
    ///
    /// A rank takes neighbours where it adds locally before it reduces, and every `world_size`-th
    /// where each micro-batch is reduced at once; either way what is added first lies together.
    pub fn global_micro_batch(&self, step: usize, rank: Rank, micro_batch: usize) -> u64 {
        let ranks = self.world_size.get();
        let in_step = match self.stage.grads() {
            Placement::Sharded => micro_batch * ranks + rank.0,
            Placement::Partial | Placement::Replicated => rank.0 * self.accumulation + micro_batch,
        };
        (step * ranks * self.accumulation + in_step) as u64
    }
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
}
