//! Taking partial sums to another placement, by the one collective that does so.

use oxizero_core::{Placement, Transition};

use crate::{CommError, Communicator, ReduceScatter, ReduceTarget};

/// Takes `op.partial` from [`Placement::Partial`] to `to`, and waits.
///
/// Replicated means that the whole buffer which holds this rank's shard of the sum is completed
/// with the others' shards; `op.target` must then be a buffer of all elements.
///
/// # Panics
///
/// If `to` is replicated and `op.target` is a shard alone: the caller's tables are wrong.
pub fn redistribute(
    comm: &dyn Communicator,
    op: ReduceScatter,
    to: Placement,
) -> Result<ReduceScatter, CommError> {
    match Placement::Partial.transition(to) {
        Some(Transition::ReduceScatter) => comm.reduce_scatter(op)?.wait(),
        Some(Transition::AllReduce) => match op.target {
            ReduceTarget::InPlace => {
                let partial = comm.all_reduce(op.partial)?.wait()?;
                Ok(ReduceScatter { partial, target: ReduceTarget::InPlace })
            }
            ReduceTarget::ShardOf(_) => complete(comm, comm.reduce_scatter(op)?.wait()?),
            ReduceTarget::Shard(..) => panic!("a shard cannot hold a replicated sum"),
        },
        _ => Ok(op),
    }
}

/// Gathers the others' shards of a sum into the buffer that holds this rank's.
fn complete(comm: &dyn Communicator, op: ReduceScatter) -> Result<ReduceScatter, CommError> {
    let ReduceScatter { partial, target: ReduceTarget::ShardOf(full) } = op else { return Ok(op) };
    let full = comm.all_gather(full)?.wait()?;
    Ok(ReduceScatter { partial, target: ReduceTarget::ShardOf(full) })
}
