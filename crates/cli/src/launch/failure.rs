//! How a rank failed, and which of several failures is the one to show.

use std::fmt;

use oxizero_comm::CommError;
use oxizero_core::Rank;

use crate::error::CliError;

/// How a rank failed.
pub(crate) struct Failure {
    pub(crate) rank: Rank,
    pub(crate) why: String,
    pub(crate) blame: Blame,
}

impl Failure {
    /// Of a rank that says why itself.
    pub(super) fn new(rank: Rank, blame: Blame, error: &dyn fmt::Display) -> Self {
        let why = match blame {
            Blame::All => error.to_string(),
            _ => format!("failed: {error}"),
        };
        Self { rank, why, blame }
    }
}

/// Who is to blame for a rank's failure. Of several failures, the first in this order tells most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Blame {
    /// The rank itself.
    Own,
    /// Who read the output and does not any more.
    Reader,
    /// Whoever the error names: it is the same on all ranks, or tells of two.
    All,
    /// Another rank, which failed before and will say why.
    Other,
    /// Nobody: the rank was asked to end, and did.
    Nobody,
}

impl Blame {
    const ALL: [Self; 5] = [Self::Own, Self::Reader, Self::All, Self::Other, Self::Nobody];

    /// For a collective that did not complete.
    pub(crate) fn of_comm(error: &CommError) -> Self {
        match error {
            CommError::PeerDead { .. } | CommError::Aborted { .. } => Self::Other,
            CommError::Timeout { .. }
            | CommError::Deadlock { .. }
            | CommError::Mismatch { .. }
            | CommError::Unfilled { .. }
            | CommError::Rendezvous { .. } => Self::All,
            _ => Self::Own,
        }
    }

    /// By which a rank's process tells its parent; a panic has a code of its own.
    pub(super) fn exit_code(self) -> u8 {
        match self {
            Self::Own => 1,
            Self::Other => 3,
            Self::All => 4,
            Self::Reader => 5,
            Self::Nobody => 6,
        }
    }

    /// From a process's exit code.
    pub(super) fn of_exit_code(code: Option<i32>) -> Self {
        let told = |blame: &Self| code == Some(blame.exit_code().into());
        Self::ALL.into_iter().find(told).unwrap_or(Self::Own)
    }
}

/// The error to show for a run whose ranks failed so; none if none did.
pub(super) fn first_cause(failures: impl IntoIterator<Item = Failure>) -> Result<(), CliError> {
    match failures.into_iter().min_by_key(|failure| failure.blame) {
        None => Ok(()),
        Some(Failure { blame: Blame::Reader, .. }) => Err(CliError::Closed),
        Some(Failure { blame: Blame::Nobody, .. }) => Err(CliError::interrupted()),
        Some(Failure { blame: Blame::All, why, .. }) => Err(CliError::Run(why)),
        Some(Failure { rank, why, .. }) => Err(CliError::Rank { rank, why }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_shown_and_not_its_consequences() {
        let failure = |rank, blame| Failure { rank: Rank(rank), why: "failed".into(), blame };
        let shown = |failures| first_cause(failures).unwrap_err().to_string();
        let [own, all, other, nobody] = [Blame::Own, Blame::All, Blame::Other, Blame::Nobody];
        assert_eq!(shown(vec![failure(0, other), failure(1, own)]), "rank 1 failed");
        assert_eq!(shown(vec![failure(0, other), failure(1, all)]), "failed");
        assert_eq!(shown(vec![failure(2, other)]), "rank 2 failed");
        assert_eq!(shown(vec![failure(0, nobody), failure(2, other)]), "rank 2 failed");
        assert!(shown(vec![failure(0, nobody)]).starts_with("interrupted"));
        assert!(first_cause([]).is_ok());
    }

    #[test]
    fn blame_goes_through_an_exit_code() {
        for blame in Blame::ALL {
            assert_eq!(Blame::of_exit_code(Some(blame.exit_code().into())), blame);
        }
        assert_eq!(Blame::of_exit_code(Some(101)), Blame::Own);
        assert_eq!(Blame::of_exit_code(None), Blame::Own);
    }
}
