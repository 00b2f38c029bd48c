//! What a rank asks for, in a form that ranks compare before data is touched.

use std::fmt;

use oxizero_core::{DType, Numel, ProcessGroup, Rank};

use crate::CommError;

/// One collective call, as every rank of the group must make it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operation {
    /// The place in the group's order of calls, counted from 1.
    pub(crate) sequence: u64,
    pub(crate) kind: Kind,
    /// The dtype that travels; `None` for plain bytes.
    pub(crate) dtype: Option<DType>,
    /// Elements of the buffer that all ranks hold in full, or bytes.
    pub(crate) numel: Numel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    ReduceScatter,
    AllGather,
    /// An all-gather of so many shards a rank; their lengths are added up when they are read.
    AllGatherMany {
        shards: usize,
    },
    Broadcast {
        root: Rank,
    },
    /// From here on the members read what each has lent: so many shards a rank.
    PeerViews {
        shards: usize,
    },
    /// No member reads any more what was lent.
    EndPeerViews,
    Exchange,
    Barrier,
    AllocReplica,
    /// The first meeting of a new group; its numel is the number of members.
    Split,
}

impl Operation {
    /// The first meeting of `group`.
    pub(crate) fn split(group: &ProcessGroup) -> Self {
        Self { sequence: 1, kind: Kind::Split, dtype: None, numel: Numel(group.size().get()) }
    }

    /// For memory that processes share.
    pub(crate) fn to_words(self) -> [u64; 3] {
        let (kind, detail) = match self.kind {
            Kind::ReduceScatter => (0, 0),
            Kind::AllGather => (1, 0),
            Kind::Broadcast { root } => (2, root.0 as u64),
            Kind::Exchange => (3, 0),
            Kind::Barrier => (4, 0),
            Kind::AllocReplica => (5, 0),
            Kind::Split => (6, 0),
            Kind::AllGatherMany { shards } => (7, shards as u64),
            Kind::PeerViews { shards } => (8, shards as u64),
            Kind::EndPeerViews => (9, 0),
        };
        let dtype = self.dtype.and_then(|dtype| DType::ALL.iter().position(|d| *d == dtype));
        let dtype = dtype.map_or(0, |index| index + 1) as u64;
        [self.sequence, kind | dtype << 8 | detail << 16, self.numel.0 as u64]
    }

    /// What [`to_words`](Self::to_words) wrote.
    ///
    /// # Panics
    ///
    /// If something else wrote it.
    pub(crate) fn from_words([sequence, word, numel]: [u64; 3]) -> Self {
        let detail = (word >> 16) as usize;
        let kind = match word & 0xff {
            0 => Kind::ReduceScatter,
            1 => Kind::AllGather,
            2 => Kind::Broadcast { root: Rank(detail) },
            3 => Kind::Exchange,
            4 => Kind::Barrier,
            5 => Kind::AllocReplica,
            6 => Kind::Split,
            7 => Kind::AllGatherMany { shards: detail },
            8 => Kind::PeerViews { shards: detail },
            9 => Kind::EndPeerViews,
            kind => panic!("no operation has the code {kind}"),
        };
        let dtype = (word >> 8 & 0xff) as usize;
        let dtype = dtype.checked_sub(1).map(|index| DType::ALL[index]);
        Self { sequence, kind, dtype, numel: Numel(numel as usize) }
    }

    /// Refuses to go on unless every one of `others` asks for the same as `rank` does.
    pub(crate) fn agree(
        &self,
        rank: Rank,
        others: impl IntoIterator<Item = (Rank, Self)>,
    ) -> Result<(), CommError> {
        match others.into_iter().find(|(_, operation)| operation != self) {
            None => Ok(()),
            Some((other, got)) => Err(CommError::Mismatch {
                sequence: self.sequence,
                rank,
                expected: self.to_string(),
                other,
                got: got.to_string(),
            }),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::ReduceScatter => write!(f, "reduce-scatter")?,
            Kind::AllGather => write!(f, "all-gather")?,
            Kind::AllGatherMany { shards } => write!(f, "all-gather from {shards} shards a rank")?,
            Kind::Broadcast { root } => write!(f, "broadcast from rank {root}")?,
            Kind::Exchange => write!(f, "exchange")?,
            Kind::Barrier => return write!(f, "barrier"),
            Kind::PeerViews { shards } => write!(f, "views of {shards} shards a rank")?,
            Kind::EndPeerViews => return write!(f, "end of views"),
            Kind::AllocReplica => write!(f, "allocation of a replica")?,
            Kind::Split => return write!(f, "split into a group of {} ranks", self.numel),
        }
        match self.dtype {
            Some(dtype) => write!(f, " of {} {dtype}", self.numel),
            None => write!(f, " of {} bytes", self.numel),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GATHER: Operation = Operation {
        sequence: 3,
        kind: Kind::AllGather,
        dtype: Some(DType::Bf16),
        numel: Numel(12),
    };

    #[test]
    fn words_keep_everything() {
        use Kind::{AllGather, AllocReplica, Barrier, Broadcast, Exchange, ReduceScatter, Split};
        let root = Rank(63);
        let kinds =
            [ReduceScatter, AllGather, Broadcast { root }, Exchange, Barrier, AllocReplica, Split];
        for kind in kinds {
            for dtype in DType::ALL.map(Some).into_iter().chain([None]) {
                let operation = Operation { sequence: 7, kind, dtype, numel: Numel(1 << 40) };
                assert_eq!(Operation::from_words(operation.to_words()), operation);
            }
        }
    }

    #[test]
    fn a_mismatch_names_both_sides() {
        let other = Operation { dtype: Some(DType::F32), ..GATHER };
        assert!(GATHER.agree(Rank(0), [(Rank(1), GATHER)]).is_ok());
        let error = GATHER.agree(Rank(0), [(Rank(1), GATHER), (Rank(2), other)]).unwrap_err();
        let text = error.to_string();
        for part in ["operation 3", "rank 0", "all-gather of 12 bf16", "rank 2", "12 f32"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
