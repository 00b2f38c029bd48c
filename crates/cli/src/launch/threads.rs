//! Ranks as threads of this process.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use oxizero_comm::Communicator;
use oxizero_comm::threads::group_with_deadline;
use oxizero_core::{Rank, WorldSize};

use super::failure::{Blame, Failure, first_cause};
use super::{POLL, Work, interrupted, threads_per_rank};
use crate::error::CliError;
use crate::rank::RankError;

/// Runs every rank in a thread pool of its own, so that what it calculates runs there too. Ranks
/// that are interrupted end with the process, which the caller must end.
pub(super) fn run(work: Work, interrupt: &AtomicBool) -> Result<(), CliError> {
    let work = Arc::new(work);
    let run = work.run();
    let world_size = WorldSize::new(run.ranks).expect("validated work has ranks");
    let deadline = Duration::from_secs_f64(run.deadline_seconds);
    let threads = threads_per_rank(run);
    let start = |comm| {
        let work = Arc::clone(&work);
        thread::spawn(move || run_rank(&work, comm, threads))
    };
    let ranks: Vec<_> = group_with_deadline(world_size, deadline).into_iter().map(start).collect();
    while !ranks.iter().all(JoinHandle::is_finished) {
        interrupted(interrupt)?;
        thread::sleep(POLL);
    }
    first_cause(world_size.ranks().zip(ranks).filter_map(join))
}

/// Runs one rank; returns how it failed, if it did.
fn run_rank(work: &Work, comm: Box<dyn Communicator>, threads: usize) -> Option<Failure> {
    let rank = comm.rank();
    let pool = match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool,
        Err(error) => {
            let why = format!("cannot start {threads} threads: {error}");
            return Some(Failure { rank, why, blame: Blame::Own });
        }
    };
    let error: RankError = pool.install(|| work.perform(comm)).err()?;
    Some(Failure::new(rank, error.blame(), &error))
}

fn join((rank, thread): (Rank, JoinHandle<Option<Failure>>)) -> Option<Failure> {
    let panicked = || Failure { rank, why: "panicked".into(), blame: Blame::Own };
    thread.join().unwrap_or_else(|_| Some(panicked()))
}
