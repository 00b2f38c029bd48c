//! Several all-gathers, for back ends that cannot make one collective of them.

use oxizero_core::{Numel, Rank};
use oxizero_device::{Buffer, kernels};

use crate::checks::check_gather_many;
use crate::{CommError, Communicator, OwnShard, numbers};

/// Gathers one shard after the other, each rank's padded to the longest of its place.
pub(crate) fn gather<C: Communicator + ?Sized>(
    comm: &C,
    shards: Vec<OwnShard>,
    mut full: Buffer,
) -> Result<(Vec<OwnShard>, Buffer), CommError> {
    check_gather_many(&shards, &full)?;
    // The lengths of the shards, and of what is asked for.
    let lens = shards.iter().map(|shard| shard.own.len()).chain([full.numel().0]);
    let told = numbers::exchange(comm, "gathers one by one", lens)?;
    let len = |rank: Rank, place: usize| told[rank.0][place];
    let ranks = || comm.world_size().ranks();
    let offers = |rank| Numel((0..shards.len()).map(|place| len(rank, place)).sum());
    let offered: Vec<_> = ranks().map(|rank| (rank, offers(rank))).collect();
    let sum: Numel = offered.iter().map(|(_, numel)| *numel).sum();
    if ranks().any(|rank| len(rank, shards.len()) != sum.0) {
        let asked: Vec<_> = ranks().map(|rank| len(rank, shards.len()).to_string()).collect();
        let wanted = format!("all-gather of shards into {} elements by rank", asked.join(", "));
        return Err(CommError::Unfilled { sequence: 0, wanted, offered });
    }
    let mut end = 0;
    for (place, shard) in shards.iter().enumerate() {
        let longest = ranks().map(|rank| len(rank, place)).max().unwrap_or(0);
        let padded = Numel(longest * comm.world_size().get());
        let mut all = Buffer::new(comm.alloc(padded.bytes(full.dtype()))?, full.dtype());
        let start = comm.rank().0 * longest;
        kernels::cast(shard.view(), all.range_mut(start..start + shard.own.len()));
        let all = comm.all_gather(all)?.wait()?;
        for rank in ranks() {
            let (from, len) = (rank.0 * longest, len(rank, place));
            kernels::cast(all.range(from..from + len), full.range_mut(end..end + len));
            end += len;
        }
    }
    Ok((shards, full))
}
