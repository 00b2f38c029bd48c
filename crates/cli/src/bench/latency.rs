//! How long collectives take that move nothing, or next to nothing.
//!
//! Each is called many times in a row, and the time of one is told. `all_gather/replica` completes
//! memory that all ranks share, whatever its size; it is left out where they share none.

use oxizero_comm::Communicator;
use oxizero_core::{Bytes, DType, Rank};
use oxizero_device::Buffer;

use super::clock::{Clock, Lap};
use super::collectives::{check, fill, given, label};
use super::hash;
use super::rows::{Row, SECONDS};
use crate::rank::RankError;

/// Calls in a row.
const CALLS: usize = 200;
/// Two numbers.
const EXCHANGED: usize = 16;

const BARRIER: &str = "barrier";

/// Every rank calls it; the replica has so many bytes.
pub(crate) fn measure(
    size: Bytes,
    rounds: usize,
    comm: &dyn Communicator,
) -> Result<Vec<Row>, RankError> {
    let (ranks, rank) = (comm.world_size().get(), comm.rank());
    let mut replica = comm.shares_replicas().then(|| Replica::new(size, comm)).transpose()?;
    let exchange = format!("exchange/{EXCHANGED}B");
    let own = [rank.0 as u8; EXCHANGED];
    let mut told = Vec::new();
    let mut clock = Clock::default();
    for _ in 0..rounds {
        let lap = Lap::start(comm)?;
        for _ in 0..CALLS {
            comm.barrier()?;
        }
        clock.stop(lap, BARRIER, BARRIER, comm)?;
        let lap = Lap::start(comm)?;
        for _ in 0..CALLS {
            told = comm.exchange("latency", &own)?;
        }
        clock.stop(lap, &exchange, BARRIER, comm)?;
        if let Some(replica) = &mut replica {
            replica.time(&mut clock, comm)?;
        }
    }
    let exchanged = hash::same(&hash::of(told.iter().map(Vec::as_slice)), &exchange, comm)?;
    let mut hashes = vec![(exchange, exchanged)];
    if let Some(replica) = replica {
        hashes.push((replica.name.clone(), replica.hash(comm)?));
    }
    let mut rows = clock.rows(ranks);
    for row in &mut rows {
        let hash = hashes.iter().find(|(name, _)| *name == row.name);
        row.hash = hash.map(|(_, hash)| hash.clone());
    }
    Ok(rows.into_iter().map(|row| row.each(CALLS as f64, SECONDS)).collect())
}

/// Memory that the ranks of the machine share, of which each has written its part.
struct Replica {
    name: String,
    whole: Buffer,
}

impl Replica {
    fn new(size: Bytes, comm: &dyn Communicator) -> Result<Self, RankError> {
        let ranks = comm.world_size().get();
        let part = size.0 / ranks / size_of::<f32>();
        let bytes = Bytes(ranks * part * size_of::<f32>());
        let mut whole = Buffer::new(comm.alloc_replica(bytes)?, DType::F32);
        let first = comm.rank().0 * part;
        fill(whole.range_mut(first..first + part), first, comm.rank());
        Ok(Self { name: format!("all_gather/replica/{}", label(size)), whole })
    }

    fn time(&mut self, clock: &mut Clock, comm: &dyn Communicator) -> Result<(), RankError> {
        let lap = Lap::start(comm)?;
        for _ in 0..CALLS {
            self.whole = comm.all_gather(self.whole.take())?.wait()?;
        }
        clock.stop(lap, &self.name, BARRIER, comm)?;
        Ok(())
    }

    fn hash(&self, comm: &dyn Communicator) -> Result<String, RankError> {
        let part = self.whole.numel().0 / comm.world_size().get();
        let expected = |index| given(index, Rank(index / part));
        check(&self.name, self.whole.f32(), 0, expected)?;
        hash::same(&hash::of([self.whole.view().bytes()]), &self.name, comm)
    }
}
