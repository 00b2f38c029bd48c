//! What a rank asks for, in a form that ranks compare before data is touched.

use std::fmt;

use oxizero_core::{DType, Numel, Rank};

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
    Broadcast { root: Rank },
    Exchange,
    Barrier,
    AllocReplica,
}

impl Operation {
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
            Kind::Broadcast { root } => write!(f, "broadcast from rank {root}")?,
            Kind::Exchange => write!(f, "exchange")?,
            Kind::Barrier => return write!(f, "barrier"),
            Kind::AllocReplica => write!(f, "allocation of a replica")?,
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
