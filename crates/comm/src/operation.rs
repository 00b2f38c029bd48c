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
    AllReduce,
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
    Exchange {
        label: Label,
    },
    Barrier,
    AllocReplica,
    /// The first meeting of a new group; its numel is the number of members.
    Split,
}

/// The beginning of what the caller says an exchange is for: it is told where ranks disagree, and
/// not compared, for a caller may want to find itself what the others ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Label([u64; LABEL_WORDS]);

const LABEL_WORDS: usize = 5;

impl Label {
    pub(crate) fn new(text: &str) -> Self {
        let text = &text[..text.floor_char_boundary(size_of::<Self>())];
        let mut words = [[0; 8]; LABEL_WORDS];
        words.as_flattened_mut()[..text.len()].copy_from_slice(text.as_bytes());
        Self(words.map(u64::from_le_bytes))
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.map(u64::to_le_bytes);
        let bytes = bytes.as_flattened();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        f.write_str(&String::from_utf8_lossy(&bytes[..end]))
    }
}

/// Words of an operation in memory that processes share.
pub(crate) const WORDS: usize = 3 + LABEL_WORDS;

impl Operation {
    /// The first meeting of `group`.
    pub(crate) fn split(group: &ProcessGroup) -> Self {
        Self { sequence: 1, kind: Kind::Split, dtype: None, numel: Numel(group.size().get()) }
    }

    /// For memory that processes share.
    pub(crate) fn to_words(self) -> [u64; WORDS] {
        let mut label = Label::default();
        let (kind, detail) = match self.kind {
            Kind::ReduceScatter => (0, 0),
            Kind::AllGather => (1, 0),
            Kind::Broadcast { root } => (2, root.0 as u64),
            Kind::Exchange { label: given } => {
                label = given;
                (3, 0)
            }
            Kind::Barrier => (4, 0),
            Kind::AllocReplica => (5, 0),
            Kind::Split => (6, 0),
            Kind::AllGatherMany { shards } => (7, shards as u64),
            Kind::PeerViews { shards } => (8, shards as u64),
            Kind::EndPeerViews => (9, 0),
            Kind::AllReduce => (10, 0),
        };
        let dtype = self.dtype.and_then(|dtype| DType::ALL.iter().position(|d| *d == dtype));
        let dtype = dtype.map_or(0, |index| index + 1) as u64;
        let [a, b, c, d, e] = label.0;
        [self.sequence, kind | dtype << 8 | detail << 16, self.numel.0 as u64, a, b, c, d, e]
    }

    /// What [`to_words`](Self::to_words) wrote.
    ///
    /// # Panics
    ///
    /// If something else wrote it.
    pub(crate) fn from_words(words: [u64; WORDS]) -> Self {
        let [sequence, word, numel, label @ ..] = words;
        let detail = (word >> 16) as usize;
        let kind = match word & 0xff {
            0 => Kind::ReduceScatter,
            1 => Kind::AllGather,
            2 => Kind::Broadcast { root: Rank(detail) },
            3 => Kind::Exchange { label: Label(label) },
            4 => Kind::Barrier,
            5 => Kind::AllocReplica,
            6 => Kind::Split,
            7 => Kind::AllGatherMany { shards: detail },
            8 => Kind::PeerViews { shards: detail },
            9 => Kind::EndPeerViews,
            10 => Kind::AllReduce,
            kind => panic!("no operation has the code {kind}"),
        };
        let dtype = (word >> 8 & 0xff) as usize;
        let dtype = dtype.checked_sub(1).map(|index| DType::ALL[index]);
        Self { sequence, kind, dtype, numel: Numel(numel as usize) }
    }

    /// What must be the same on all ranks.
    fn compared(self) -> Self {
        match self.kind {
            Kind::Exchange { .. } => {
                Self { kind: Kind::Exchange { label: Label::default() }, ..self }
            }
            _ => self,
        }
    }

    /// Refuses to go on unless every one of `others` asks for the same as `rank` does.
    pub(crate) fn agree(
        &self,
        rank: Rank,
        others: impl IntoIterator<Item = (Rank, Self)>,
    ) -> Result<(), CommError> {
        let differs = |operation: &Self| operation.compared() != self.compared();
        match others.into_iter().find(|(_, operation)| differs(operation)) {
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
            Kind::AllReduce => write!(f, "all-reduce")?,
            Kind::AllGather => write!(f, "all-gather")?,
            Kind::AllGatherMany { shards } => write!(f, "all-gather from {shards} shards a rank")?,
            Kind::Broadcast { root } => write!(f, "broadcast from rank {root}")?,
            Kind::Exchange { label } => {
                return write!(f, "exchange of {} bytes for {label}", self.numel);
            }
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
        use Kind::{AllGather, AllReduce, Barrier, Broadcast, Exchange, ReduceScatter, Split};
        let root = Rank(63);
        let exchange =
            Exchange { label: Label::new("a label that is longer than there is room for") };
        let kinds =
            [ReduceScatter, AllReduce, AllGather, Broadcast { root }, exchange, Barrier, Split];
        for kind in kinds {
            for dtype in DType::ALL.map(Some).into_iter().chain([None]) {
                let operation = Operation { sequence: 7, kind, dtype, numel: Numel(1 << 40) };
                assert_eq!(Operation::from_words(operation.to_words()), operation);
            }
        }
    }

    #[test]
    fn labels_are_told_and_not_compared() {
        let exchange = |label, numel| Operation {
            kind: Kind::Exchange { label: Label::new(label) },
            dtype: None,
            numel: Numel(numel),
            ..GATHER
        };
        let step = exchange("step", 48);
        assert!(step.agree(Rank(0), [(Rank(1), exchange("full_grads", 48))]).is_ok());
        let error = step.agree(Rank(0), [(Rank(1), exchange("full_grads", 47))]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rank 0 asks for exchange of 48 bytes for step"), "{text}");
        assert!(text.contains("rank 1 for exchange of 47 bytes for full_grads"), "{text}");
        let long = exchange(&"\u{2026}".repeat(20), 1).to_string();
        assert!(long.ends_with(&format!("for {}", "\u{2026}".repeat(13))), "{long}");
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
