//! What is done to a bucket's contributions on their way to where they rest.

use std::ops::Range;

use oxizero_comm::{CommError, Communicator, ReduceScatter, ReduceTarget, redistribute};
use oxizero_core::{Bytes, DType, Placement};
use oxizero_device::kernels::{self, Combine};
use oxizero_device::{Buffer, View};

use crate::gradient::alloc_scratch;

/// Takes contributions to another placement. It owns what it needs, so that it may run on any
/// thread.
#[derive(Debug)]
pub(crate) struct Reduction {
    /// This rank's contributions.
    pub(crate) partial: Buffer,
    /// The elements of parameters that did not contribute: they contribute zeros.
    pub(crate) absent: Vec<Range<usize>>,
    /// What travels.
    pub(crate) wire: DType,
    pub(crate) to: Placement,
    /// Where the sum of the owned elements rests, and what becomes of the one that is there;
    /// `None` where sums rest in the buffer of contributions.
    pub(crate) shard: Option<(Buffer, Combine)>,
}

impl Reduction {
    /// What rests, without what is only on its way.
    pub(crate) fn resting_bytes(&self) -> Bytes {
        self.shard.as_ref().map_or(self.partial.len(), |(shard, _)| shard.len())
    }

    /// The most bytes that it takes beside what rests, where a reduce-scatter takes as much as
    /// `scratch` beside its operands.
    pub(crate) fn most_bytes_beside(&self, scratch: Bytes) -> Bytes {
        let sent = self.partial.numel().bytes(self.wire);
        let scratch = scratch.min(sent);
        let collected = self.shard.as_ref().map_or(Bytes(0), |_| self.partial.len());
        match self.partial.dtype() == self.wire {
            true => collected + scratch,
            // What was cast is let go before the rest is reduced.
            false => sent + collected.max(scratch),
        }
    }

    /// Does it.
    pub(crate) fn run(self, comm: &dyn Communicator) -> Result<Reduced, CommError> {
        let Self { mut partial, absent, wire, to, shard } = self;
        for elements in absent {
            kernels::fill(partial.range_mut(elements), 0.0);
        }
        let (sent, kept) = match partial.dtype() == wire {
            true => (partial, None),
            false => (cast(partial.view(), wire, comm)?, Some(partial)),
        };
        let target = match (shard, kept) {
            (Some((shard, combine)), _) => ReduceTarget::Shard(shard, combine),
            (None, Some(kept)) => ReduceTarget::ShardOf(kept),
            (None, None) => ReduceTarget::InPlace,
        };
        let op = redistribute(comm, ReduceScatter { partial: sent, target }, to)?;
        Ok(match op.target {
            ReduceTarget::Shard(sum, _) | ReduceTarget::ShardOf(sum) => {
                Reduced { sum, _spent: Some(op.partial) }
            }
            ReduceTarget::InPlace => Reduced { sum: op.partial, _spent: None },
        })
    }
}

/// What came of a reduction.
#[derive(Debug)]
pub(crate) struct Reduced {
    /// The buffer in which the sum rests.
    pub(crate) sum: Buffer,
    /// What was sent: it is freed where the reduction is waited for, after a device's work on it.
    _spent: Option<Buffer>,
}

fn cast(values: View<'_>, dtype: DType, comm: &dyn Communicator) -> Result<Buffer, CommError> {
    let mut narrow = alloc_scratch(comm, values.numel(), dtype)?;
    kernels::cast(values, narrow.view_mut());
    Ok(narrow)
}
