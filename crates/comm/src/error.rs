//! What can go wrong between ranks.

use std::time::Duration;

use oxizero_core::{Numel, ProcessGroup, Rank};

/// A collective that did not complete.
///
/// Ranks are numbered as in the world, in sub-groups too. `Misuse` and `NotInGroup` are found
/// before anything is sent, and leave the group as it was; every other error is final: later
/// operations fail likewise. What fails on one rank alone (`System`), or in a group of some ranks
/// (`Mismatch`, `Unfilled`), is `Aborted` on the others.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Another rank's process or thread ended.
    #[error(
        "rank {rank} ended while others waited for it in {during}; look at its output for the \
         reason"
    )]
    PeerDead {
        /// The rank that ended.
        rank: Rank,
        /// The operation that this rank was in.
        during: String,
    },
    /// A rank did not come in time.
    #[error(
        "rank {rank} let rank {waiter} wait for more than {deadline:?}; {} (found in {during})",
        meanwhile(waits.as_deref())
    )]
    Timeout {
        /// The rank that did not come.
        rank: Rank,
        /// The rank that waited for it, and gave up first.
        waiter: Rank,
        /// The operation that this rank was in.
        during: String,
        /// How long a rank waits.
        deadline: Duration,
        /// In which operations the rank that did not come waits itself, and for whom, if it does.
        waits: Option<String>,
    },
    /// Ranks wait for each other, each in an operation to which the next does not come.
    ///
    /// It is found where each of them has called from one thread alone, as another thread of a rank
    /// might still come; else the wait ends with `Timeout`.
    #[error(
        "{waits}: they wait for each other for good; every rank must make the same calls in the \
         same order, those in different groups too"
    )]
    Deadlock {
        /// Who waits for whom, in which operation of which group.
        waits: String,
    },
    /// Two ranks asked for different operations at the same place in their order.
    #[error(
        "ranks disagree on operation {sequence}: rank {rank} asks for {expected}, rank {other} \
         for {got}; every rank must make the same calls in the same order"
    )]
    Mismatch {
        /// The place in the order, counted from 1.
        sequence: u64,
        /// This rank.
        rank: Rank,
        /// What this rank asked for.
        expected: String,
        /// The rank that differs.
        other: Rank,
        /// What that rank asked for.
        got: String,
    },
    /// What the ranks offer to a gather is not as long as the buffer that all of them give it.
    #[error(
        "operation {sequence} is {wanted}, and the ranks' shards do not make that: {}",
        list(offered)
    )]
    Unfilled {
        /// The place in the order, counted from 1; 0 for an operation of several.
        sequence: u64,
        /// What all ranks asked for.
        wanted: String,
        /// The elements that each rank offers.
        offered: Vec<(Rank, Numel)>,
    },
    /// A rank gave up, and said why.
    #[error("rank {rank} gave up: {why}")]
    Aborted {
        /// The rank that gave up.
        rank: Rank,
        /// Its reason.
        why: String,
    },
    /// A buffer does not fit the operation.
    #[error("{operation}: {problem}")]
    Misuse {
        /// The operation.
        operation: &'static str,
        /// What does not fit.
        problem: String,
    },
    /// `split` was called for a group that this rank is not in.
    #[error("rank {rank} is not in the group {group}")]
    NotInGroup {
        /// This rank.
        rank: Rank,
        /// The group.
        group: ProcessGroup,
    },
    /// The ranks did not find each other.
    #[error("rank {rank} could not join the group: {why}")]
    Rendezvous {
        /// This rank.
        rank: Rank,
        /// What failed, and what to do.
        why: String,
    },
    /// The operating system refused memory or a descriptor, or what was set aside is used up.
    #[error("{operation}: {why}")]
    System {
        /// What was asked for.
        operation: &'static str,
        /// The system's answer.
        why: String,
    },
}

impl CommError {
    /// Who learns of it without being told.
    pub(crate) fn known_to(&self) -> KnownTo {
        match self {
            Self::PeerDead { .. }
            | Self::Timeout { .. }
            | Self::Deadlock { .. }
            | Self::Aborted { .. } => KnownTo::World,
            Self::Mismatch { .. } | Self::Unfilled { .. } => KnownTo::Group,
            Self::Misuse { .. }
            | Self::NotInGroup { .. }
            | Self::Rendezvous { .. }
            | Self::System { .. } => KnownTo::Rank,
        }
    }
}

/// Who learns of an error, while the others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KnownTo {
    /// This rank alone.
    Rank,
    /// The members of the group in which it arose.
    Group,
    /// Every rank.
    World,
}

fn meanwhile(waits: Option<&str>) -> String {
    match waits {
        Some(waits) => format!("it waits itself: {waits}"),
        None => "it is stuck, or busy for longer than the deadline allows".to_owned(),
    }
}

fn list(offered: &[(Rank, Numel)]) -> String {
    let sum = Numel(offered.iter().map(|(_, numel)| numel.0).sum());
    let ranks: Vec<_> =
        offered.iter().map(|(rank, numel)| format!("{numel} of rank {rank}")).collect();
    format!("{} are {sum} elements", ranks.join(", "))
}
