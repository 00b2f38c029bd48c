//! Where the elements of a buffer live across the ranks of a process group, and what a ZeRO stage
//! makes of that. Nothing else in ZeRO communicates.

use serde::{Deserialize, Serialize};

/// How the ranks of a data-parallel group share a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Every rank holds all elements, and they agree.
    Replicated,
    /// Every rank holds one contiguous shard of the elements.
    Sharded,
    /// Every rank holds all elements of its own unreduced contribution.
    Partial,
}

/// The work that takes a buffer from one placement to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transition {
    /// Already there.
    Stay,
    /// Replicated to sharded, which needs no communication.
    Slice,
    /// Sharded to replicated.
    AllGather,
    /// Partial to sharded.
    ReduceScatter,
    /// Partial to replicated.
    AllReduce,
}

impl Placement {
    /// The transition from `self` to `target`, or `None` where ZeRO has no use for one.
    pub fn transition(self, target: Self) -> Option<Transition> {
        use Placement::{Partial, Replicated, Sharded};
        match (self, target) {
            (Replicated, Replicated) | (Sharded, Sharded) | (Partial, Partial) => {
                Some(Transition::Stay)
            }
            (Replicated, Sharded) => Some(Transition::Slice),
            (Sharded, Replicated) => Some(Transition::AllGather),
            (Partial, Sharded) => Some(Transition::ReduceScatter),
            (Partial, Replicated) => Some(Transition::AllReduce),
            (Replicated | Sharded, Partial) => None,
        }
    }
}

/// What rests sharded between steps; each stage shards one thing more than the last.
///
/// Source: "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Stage {
    /// Nothing: plain data parallelism.
    Zero0,
    /// Master weights and optimizer states.
    Zero1,
    /// Those and gradients.
    Zero2,
    /// Those and model weights.
    Zero3,
}

impl Stage {
    /// Every stage, from plain data parallelism to all sharded.
    pub const ALL: [Self; 4] = [Self::Zero0, Self::Zero1, Self::Zero2, Self::Zero3];

    /// Where model weights rest.
    pub fn model(self) -> Placement {
        self.sharded_from(Self::Zero3, Placement::Replicated)
    }

    /// Where gradients rest between micro-batches.
    pub fn grads(self) -> Placement {
        self.sharded_from(Self::Zero2, Placement::Partial)
    }

    /// Where master weights and optimizer states rest.
    pub fn optim(self) -> Placement {
        self.sharded_from(Self::Zero1, Placement::Replicated)
    }

    fn sharded_from(self, first: Self, before: Placement) -> Placement {
        if self >= first { Placement::Sharded } else { before }
    }
}

impl TryFrom<u8> for Stage {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|stage| u8::from(*stage) == number);
        found.ok_or_else(|| format!("`{number}` is not a ZeRO stage; allowed: 0, 1, 2, 3"))
    }
}

impl From<Stage> for u8 {
    fn from(stage: Stage) -> Self {
        stage as Self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_the_papers() {
        use Placement::{Partial, Replicated, Sharded};
        let table = Stage::ALL.map(|stage| [stage.model(), stage.grads(), stage.optim()]);
        assert_eq!(table[0], [Replicated, Partial, Replicated]);
        assert_eq!(table[1], [Replicated, Partial, Sharded]);
        assert_eq!(table[2], [Replicated, Sharded, Sharded]);
        assert_eq!(table[3], [Sharded, Sharded, Sharded]);
    }

    #[test]
    fn every_move_a_stage_asks_for_exists() {
        for stage in Stage::ALL {
            assert!(Placement::Partial.transition(stage.grads()).is_some());
            assert!(stage.grads().transition(stage.optim()).is_some());
            assert!(stage.optim().transition(stage.model()).is_some());
            assert!(stage.model().transition(Placement::Replicated).is_some());
        }
    }

    #[test]
    fn stages_are_numbers_outside() {
        assert_eq!(Stage::try_from(3), Ok(Stage::Zero3));
        assert!(Stage::try_from(4).unwrap_err().contains("allowed: 0, 1, 2, 3"));
    }
}
