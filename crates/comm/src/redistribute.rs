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
        Some(Transition::AllReduce) => {
            let ReduceScatter { partial, target } = comm.reduce_scatter(op)?.wait()?;
            match target {
                ReduceTarget::InPlace => {
                    let partial = comm.all_gather(partial)?.wait()?;
                    Ok(ReduceScatter { partial, target: ReduceTarget::InPlace })
                }
                ReduceTarget::ShardOf(full) => {
                    let full = comm.all_gather(full)?.wait()?;
                    Ok(ReduceScatter { partial, target: ReduceTarget::ShardOf(full) })
                }
                ReduceTarget::Shard(..) => panic!("a shard cannot hold a replicated sum"),
            }
        }
        _ => Ok(op),
    }
}
