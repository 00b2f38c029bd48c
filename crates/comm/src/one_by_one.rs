//! Several all-gathers, for back ends that cannot make one collective of them.

use oxizero_core::{Numel, Rank};
use oxizero_device::{Buffer, kernels};

use crate::{CommError, Communicator, OwnShard};

/// Gathers one shard after the other, each rank's padded to the longest of its place.
pub(crate) fn gather<C: Communicator + ?Sized>(
    comm: &C,
    shards: Vec<OwnShard>,
    mut full: Buffer,
) -> Result<(Vec<OwnShard>, Buffer), CommError> {
    let own: Vec<u8> =
        shards.iter().flat_map(|shard| (shard.own.len() as u64).to_le_bytes()).collect();
    let told = comm.exchange(&own)?;
    let len = |rank: Rank, place: usize| {
        let bytes = &told[rank.0][8 * place..8 * (place + 1)];
        u64::from_le_bytes(bytes.try_into().expect("a slice of eight bytes")) as usize
    };
    let ranks = || comm.world_size().ranks();
    let all = ranks().flat_map(|rank| (0..shards.len()).map(move |place| (rank, place)));
    let offered = Numel(all.map(|(rank, place)| len(rank, place)).sum());
    if offered != full.numel() {
        let wanted = full.numel();
        let problem =
            format!("all ranks' shards are {offered} elements, and {wanted} are asked for");
        return Err(CommError::Misuse { operation: "all-gather", problem });
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
