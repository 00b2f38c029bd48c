//! What a collective may be given, wherever it runs.

use oxizero_core::{Numel, Rank, WorldSize};
use oxizero_device::Buffer;

use crate::{CommError, OwnShard, ReduceScatter, ReduceTarget};

pub(crate) fn check_reduce_scatter(
    op: &ReduceScatter,
    world_size: WorldSize,
) -> Result<(), CommError> {
    let numel = op.partial.numel();
    check_shards("reduce-scatter", numel, world_size)?;
    let (got, expected) = match &op.target {
        ReduceTarget::InPlace => return Ok(()),
        ReduceTarget::Shard(shard, _) => (shard.numel(), Numel(numel.0 / world_size.get())),
        ReduceTarget::ShardOf(full) => (full.numel(), numel),
    };
    if got != expected {
        let problem = format!("the target has {got} elements; {expected} fit this operation");
        return Err(misuse("reduce-scatter", problem));
    }
    Ok(())
}

pub(crate) fn check_gather_into(
    shard: &Buffer,
    full: &Buffer,
    world_size: WorldSize,
) -> Result<(), CommError> {
    let expected = shard.numel() * world_size.get();
    if shard.dtype() != full.dtype() || expected != full.numel() {
        let problem = format!(
            "{world_size} shards of {} {} do not make {} {}",
            shard.numel(),
            shard.dtype(),
            full.numel(),
            full.dtype()
        );
        return Err(misuse("all-gather", problem));
    }
    Ok(())
}

pub(crate) fn check_gather_many(shards: &[OwnShard], full: &Buffer) -> Result<(), CommError> {
    let refuse = |problem| Err(misuse("all-gather", problem));
    for (index, OwnShard { buffer, own }) in shards.iter().enumerate() {
        if buffer.dtype() != full.dtype() {
            let (one, other) = (buffer.dtype(), full.dtype());
            return refuse(format!("shard {index} is {one}, and what it is gathered into {other}"));
        }
        if own.start > own.end || own.end > buffer.numel().0 {
            let numel = buffer.numel();
            return refuse(format!("shard {index} is {own:?} of a buffer of {numel} elements"));
        }
    }
    Ok(())
}

pub(crate) fn check_shards(
    operation: &'static str,
    numel: Numel,
    world_size: WorldSize,
) -> Result<(), CommError> {
    if numel.0.is_multiple_of(world_size.get()) {
        return Ok(());
    }
    let problem = format!("{numel} elements do not fall into {world_size} equal shards; pad them");
    Err(misuse(operation, problem))
}

pub(crate) fn check_root(root: Rank, world_size: WorldSize) -> Result<(), CommError> {
    if root.0 >= world_size.get() {
        return Err(misuse("broadcast", format!("no rank {root} of {world_size}")));
    }
    Ok(())
}

pub(crate) fn misuse(operation: &'static str, problem: String) -> CommError {
    CommError::Misuse { operation, problem }
}
