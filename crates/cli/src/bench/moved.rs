//! The bytes that a rank must read and write in a step, whoever does it.
//!
//! Of a model of N elements, whose ranks W share everything, in a window of one micro-batch. What
//! is read and written by each pass over the elements, with bytes an element of d for the model's
//! dtype, w for what travels, a for what contributions are collected in, and 4 for accumulators,
//! masters and each state:
//!
//! | pass | stages | reads | writes |
//! |---|---|---|---|
//! | gather of weights, before forward and before backward | 3 | 2 N d | 2 N d |
//! | contribution | all | N d | N a |
//! | cast to what travels, where a is not w | 0, 1 | N a | N w |
//! | reduce-scatter: all ranks' contributions to this rank's part | all | N w | N/W 4 |
//! | the others' parts of the sum | 0 | N (1 - 1/W) 4 | N (1 - 1/W) 4 |
//! | norm | all | N/W 4 | |
//! | update | 1 to 3 | N/W (8 + 4 s) | N/W (4 + 4 s + d) |
//! | update | 0 | N (8 + 4 s) | N (4 + 4 s + d) |
//! | publication of weights, where ranks share no memory | 1, 2 | N (1 - 1/W) d | N (1 - 1/W) d |
//!
//! An update of f32 weights that are themselves the masters writes them once. Nothing is counted of
//! what memory costs before it is used, of padding, or of what fits in a cache.

use oxizero_core::{Bytes, DType, Placement, Precision, Stage, WorldSize, model_is_master};

/// How a model is trained, as far as bytes depend on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Training {
    pub(crate) numel: usize,
    pub(crate) dtype: DType,
    pub(crate) stage: Stage,
    /// f32 states an element.
    pub(crate) states: usize,
    pub(crate) world_size: WorldSize,
    /// The ranks hold one copy of replicated weights.
    pub(crate) shares_replicas: bool,
}

/// What a rank moves: reads and writes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Before the step that ends the window.
    pub(crate) micro_batch: Bytes,
    /// In that step.
    pub(crate) boundary: Bytes,
}

impl Training {
    /// The bytes of a rank.
    pub(crate) fn moved(&self) -> Moved {
        let reduces_early = self.stage.grads() == Placement::Sharded;
        let (early, late) = if reduces_early { (self.reduced(), 0) } else { (0, self.reduced()) };
        Moved {
            micro_batch: Bytes(self.gathered() + self.contributed() + early),
            boundary: Bytes(late + self.measured() + self.updated() + self.published()),
        }
    }

    /// Elements of this rank's part.
    fn part(&self) -> usize {
        self.numel / self.world_size.get()
    }

    fn precision(&self) -> Precision {
        Precision::of_model(self.dtype)
    }

    /// The dtype that contributions are collected in.
    fn collected(&self) -> DType {
        self.precision().collected(self.stage.grads() == Placement::Sharded)
    }

    fn gathered(&self) -> usize {
        match self.stage.model() {
            Placement::Sharded => 2 * 2 * self.numel * self.dtype.size(),
            _ => 0,
        }
    }

    fn contributed(&self) -> usize {
        self.numel * (self.dtype.size() + self.collected().size())
    }

    fn reduced(&self) -> usize {
        let (collected, wire) = (self.collected(), self.precision().wire(1));
        let cast = if collected == wire { 0 } else { collected.size() + wire.size() };
        let sum = self.numel * wire.size() + self.part() * F32;
        let others = match self.stage.optim() {
            Placement::Sharded => 0,
            _ => 2 * (self.numel - self.part()) * F32,
        };
        self.numel * cast + sum + others
    }

    fn measured(&self) -> usize {
        self.part() * F32
    }

    fn updated(&self) -> usize {
        let owned = match self.stage.optim() {
            Placement::Sharded => self.part(),
            _ => self.numel,
        };
        let is_master = model_is_master(self.stage, self.dtype, self.shares_replicas);
        let model = if is_master { 0 } else { self.dtype.size() };
        owned * (F32 + 2 * (1 + self.states) * F32 + model)
    }

    fn published(&self) -> usize {
        let parts = self.stage.optim() == Placement::Sharded;
        let is_gathered = parts && self.stage.model() == Placement::Replicated;
        match is_gathered && !self.shares_replicas {
            true => 2 * (self.numel - self.part()) * self.dtype.size(),
            false => 0,
        }
    }
}

const F32: usize = size_of::<f32>();

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(stage: u8, dtype: DType, shares_replicas: bool) -> (usize, usize) {
        let stage = Stage::try_from(stage).unwrap();
        let world_size = WorldSize::new(2).unwrap();
        let training = Training { numel: 8, dtype, stage, states: 2, world_size, shares_replicas };
        let Moved { micro_batch, boundary } = training.moved();
        (micro_batch.0, boundary.0)
    }

    /// By hand: 8 elements of bf16, 4 of which are this rank's; Adam's two states.
    #[test]
    fn every_pass_of_a_stage_is_counted() {
        let update = 4 * (8 + 8 + 4 + 8 + 2);
        let late = (8 * 4 + 8 * 2) + (8 * 2 + 4 * 4) + 4 * 4;
        assert_eq!(moved(1, DType::Bf16, true), (8 * 2 + 8 * 4, late + update));
        let publish = 2 * 4 * 2;
        assert_eq!(moved(1, DType::Bf16, false), (8 * 2 + 8 * 4, late + update + publish));
        let early = (8 * 2 + 8 * 2) + (8 * 2 + 4 * 4);
        assert_eq!(moved(2, DType::Bf16, true), (early, 4 * 4 + update));
        assert_eq!(moved(2, DType::Bf16, false), (early, 4 * 4 + update + publish));
        for shares_replicas in [false, true] {
            let gather = 2 * (8 * 2 + 8 * 2);
            assert_eq!(moved(3, DType::Bf16, shares_replicas), (gather + early, 4 * 4 + update));
        }
        let all = late + 2 * 4 * 4 + 2 * update;
        assert_eq!(moved(0, DType::Bf16, true), (8 * 2 + 8 * 4, all));
    }

    #[test]
    fn f32_weights_that_are_masters_are_written_once() {
        let early = (8 * 4 + 8 * 4) + (8 * 4 + 4 * 4);
        assert_eq!(moved(2, DType::F32, true), (early, 4 * 4 + 4 * (8 + 8 + 4 + 8)));
    }
}
