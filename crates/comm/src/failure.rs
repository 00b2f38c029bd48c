//! Why a world cannot go on.

use std::time::Duration;

use oxizero_core::Rank;

use crate::CommError;
use crate::operation::Operation;

/// Why no operation of any group of this world can complete any more. The first cause stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A rank's process or thread ended.
    Dead(Rank),
    /// A rank let the deadline of another, `waiter`, pass; empty unless it waits itself.
    Late { rank: Rank, waiter: Rank, waits: String },
    /// Ranks wait for each other.
    Deadlock { finder: Rank, waits: String },
    /// A rank gave up, and said why.
    Aborted(Rank, String),
}

impl Failure {
    /// The error of a rank that is in `operation`.
    pub(crate) fn error(&self, operation: &Operation, deadline: Duration) -> CommError {
        let during = operation.to_string();
        match self.clone() {
            Self::Dead(rank) => CommError::PeerDead { rank, during },
            Self::Late { rank, waiter, waits } => {
                let waits = Some(waits).filter(|waits| !waits.is_empty());
                CommError::Timeout { rank, waiter, during, deadline, waits }
            }
            Self::Deadlock { waits, .. } => CommError::Deadlock { waits },
            Self::Aborted(rank, why) => CommError::Aborted { rank, why },
        }
    }
}
