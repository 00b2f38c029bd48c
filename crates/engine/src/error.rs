//! What the engine can refuse, or fail at.

use oxizero_checkpoint::CheckpointError;
use oxizero_comm::CommError;
use oxizero_core::{ConfigError, DType, LossScaleAtMinimum, Numel, Rank};
use oxizero_optim::OptimError;

use crate::Fact;

/// Every error of the engine.
///
/// After [`Comm`](Self::Comm) the engine is lost, for buffers were on their way; after
/// [`LossScale`](Self::LossScale) the window is; after [`HalfLoaded`](Self::HalfLoaded) the weights
/// are, until a checkpoint is loaded. After every other error of a method the engine is
/// as it was, and training can go on where all ranks were refused alike.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The configuration is not possible.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The optimizer's settings are not possible.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A checkpoint has not the tensors that the engine has.
    #[error(
        "the checkpoint is another model's or optimizer's; it has not: {}; and the engine has not: \
         {}; load what is there with Names::Listed, or weights alone with What::Weights",
        listed(missing),
        listed(unexpected)
    )]
    NamesDiffer {
        /// What the engine has and the checkpoint has not.
        missing: Vec<String>,
        /// What the checkpoint has and the engine has not.
        unexpected: Vec<String>,
    },
    /// A checkpoint turned out to be damaged after some of it was loaded.
    #[error(
        "the last checkpoint that was loaded was damaged, so that the weights are neither the old \
         ones nor its own; load another"
    )]
    HalfLoaded,
    /// Something that is done between windows was asked for within one.
    #[error("{call} was called between a backward and its step; call it after step()")]
    InWindow {
        /// The method.
        call: &'static str,
    },
    /// A parameter cannot be trained as it is given, or has not what is asked of it.
    #[error("parameter `{param}`: {problem}")]
    Param {
        /// The parameter's name.
        param: String,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// The ranks were started with different parameters or options.
    #[error(
        "{fact} is {expected} on rank 0 and {got} on rank {rank}; give every rank the same \
         parameters, in the same order, and the same options"
    )]
    SetupDiffers {
        /// The first rank that differs from rank 0.
        rank: Rank,
        /// What differs first.
        fact: Fact,
        /// What it is on rank 0.
        expected: String,
        /// What it is on the other rank.
        got: String,
    },
    /// The ranks are about to step with different hyper-parameters.
    #[error(
        "rank {rank} steps with other learning rates, weight decays or optimizer settings than \
         rank 0; change them alike on every rank"
    )]
    HyperDiffers {
        /// The first rank that differs from rank 0.
        rank: Rank,
    },
    /// Weights were written between steps, not alike on all ranks that hold the same of them.
    #[error(
        "`{param}` has other weights on {} than on rank {first}: it was not written alike; write \
         the same on every rank, and step again",
        of_ranks(others)
    )]
    WritesDiffer {
        /// The first parameter that was not written alike.
        param: String,
        /// The first of the ranks that are to hold the same of it.
        first: Rank,
        /// Those of them that hold others than the first.
        others: Vec<Rank>,
    },
    /// An index that the engine was never given.
    #[error("no {what} {index}: the engine was given {count}")]
    Unknown {
        /// Parameter or unit.
        what: &'static str,
        /// What was asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A name that no parameter has.
    #[error("the engine was never given a parameter `{name}`")]
    UnknownParam {
        /// What was asked for.
        name: String,
    },
    /// Values of another number than there are to be.
    #[error("{got} elements were given as the {what} of `{param}`, which has {expected}")]
    WrongNumel {
        /// Which values: a gradient, master weights or a state, whole or this rank's part.
        what: &'static str,
        /// The parameter's name.
        param: String,
        /// How many it has.
        expected: Numel,
        /// How many were given.
        got: Numel,
    },
    /// Values that would be rounded where they are stored.
    #[error("{got} values were given as the {what} of `{param}`, which is stored in {expected}")]
    WrongDType {
        /// Which values, as in [`WrongNumel`](Self::WrongNumel).
        what: &'static str,
        /// The parameter's name.
        param: String,
        /// The dtype that they are stored in; f32 takes every dtype.
        expected: DType,
        /// The dtype of the values.
        got: DType,
    },
    /// Ranks that are to have the same gradient of a parameter: some have none.
    #[error(
        "rank {first} has gradients of `{param}` in this window and rank {second} has none, though \
         the mesh says that theirs are the same; use it on both, or let it be Reduced along their \
         axis"
    )]
    ReplicasDiffer {
        /// The parameter's name.
        param: String,
        /// A rank that used it.
        first: Rank,
        /// A rank that did not.
        second: Rank,
    },
    /// A gradient that should not have come.
    #[error("the gradient of `{param}` cannot be taken: {why}")]
    UnexpectedGrad {
        /// The parameter's name.
        param: String,
        /// Why not, and what to do.
        why: String,
    },
    /// Ranks called different things, or the same for different parameters.
    #[error(
        "rank {rank} did not make the same call as this rank, which asked for {call}: it asked for \
         {other}; every rank makes the same calls in the same order"
    )]
    CallsDiffer {
        /// The first rank that differs.
        rank: Rank,
        /// This rank's call.
        call: String,
        /// The beginning of the other's call.
        other: String,
    },
    /// Ranks that hold the same of a parameter were given different values for it.
    #[error(
        "{call} was called with other values on {} than on rank {first}, and both hold the same \
         of it; give the same values on every rank",
        of_ranks(others)
    )]
    ValuesDiffer {
        /// The call, and the parameter.
        call: String,
        /// The first of the ranks that hold the same.
        first: Rank,
        /// Those of them that were given others than the first.
        others: Vec<Rank>,
    },
    /// A state that the optimizer does not keep.
    #[error("the optimizer keeps no state `{name}`; it keeps: {kept}")]
    UnknownState {
        /// What was asked for.
        name: String,
        /// The states that there are.
        kept: String,
    },
    /// `step` without `backward_end` before it.
    #[error(
        "step() ends a micro-batch, but backward_end() was not called since its last gradient or \
         pre_backward()"
    )]
    NoBackward,
    /// More of a window than its step, after its gradients were reduced.
    #[error("the window's gradients are reduced already; call step() before the next backward")]
    AlreadyReduced,
    /// Ranks multiplied their losses by different scales.
    #[error(
        "rank {first} has gradients with loss scale {expected}, rank {second} with {got}; take \
         Engine::loss_scale on every rank"
    )]
    LossScalesDiffer {
        /// One rank.
        first: Rank,
        /// Its scale.
        expected: f32,
        /// Another rank.
        second: Rank,
        /// Its scale.
        got: f32,
    },
    /// Ranks that the mesh says work on the same micro-batches did not.
    #[error(
        "ranks {first} and {second} are to work on the same micro-batches, but in this window rank \
         {first} had {expected}, rank {second} {got}; step, weigh and set the boundary alike on \
         both, or give their axis of the mesh Batches::Different"
    )]
    BatchesDiffer {
        /// One rank.
        first: Rank,
        /// What it had.
        expected: String,
        /// Another rank.
        second: Rank,
        /// What it had.
        got: String,
    },
    /// Gradients that were set by some of the ranks that hold the same tensor.
    #[error(
        "rank {first} sets the gradient of `{param}` and rank {second} does not, though they hold \
         the same tensor; write to it on both, or on neither"
    )]
    GivenDiffer {
        /// The parameter's name.
        param: String,
        /// A rank that sets it.
        first: Rank,
        /// A rank that does not.
        second: Rank,
    },
    /// A weighted window whose micro-batches weigh nothing.
    #[error("the window's micro-batches weigh nothing; call weigh() for each of them")]
    NoWeight,
    /// Gradients overflow however small the loss scale is.
    #[error(transparent)]
    LossScale(#[from] LossScaleAtMinimum),
    /// A unit's full weights were asked for outside of its forward and backward.
    #[error("the weights of unit {unit} are not gathered; call pre_forward or pre_backward first")]
    NotGathered {
        /// The unit.
        unit: usize,
    },
    /// Weights are still lent out when they are to be written.
    #[error(
        "the weights of `{param}` are still in use, so the step cannot write them: drop tensors, \
         tapes and UnitWeights that were made in forward (evaluate with Segment::infer)"
    )]
    WeightsInUse {
        /// The first parameter of the bucket.
        param: String,
    },
    /// Another rank refused a collective call, for a reason that it reports itself.
    #[error("rank {rank} refused the call; it reports why")]
    PeerRefused {
        /// The rank.
        rank: Rank,
    },
    /// Gradients were asked for before the window's last backward.
    #[error("gradients are not ready: no backward has ended in this window")]
    NotReady,
    /// Gradients were asked for in the middle of a window.
    #[error(
        "gradients are not ready: {n} of {of} micro-batches of the window have ended their backward"
    )]
    MidWindow {
        /// Micro-batches that have ended.
        n: usize,
        /// Micro-batches that the window will hold at least.
        of: usize,
    },
    /// Gradients were asked for after the step that consumed them.
    #[error("gradients were consumed by the last step; read them between backward and step")]
    Consumed,
}

fn of_ranks(ranks: &[Rank]) -> String {
    let names: Vec<_> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if names.len() == 1 { "" } else { "s" }, listed(&names))
}

/// A few of them, for a message.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.is_empty() {
        text.push_str("nothing");
    }
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}
