//! Ranks as threads of this process.

use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use oxizero_comm::Communicator;
use oxizero_comm::threads::group_with_deadline;
use oxizero_core::{Rank, WorldSize};

use super::failure::{Blame, Failure, first_cause};
use super::threads_per_rank;
use crate::error::CliError;
use crate::job::Job;
use crate::rank::{self, RankError};

/// Runs every rank in a thread pool of its own, so that what it calculates runs there too.
pub(super) fn run(job: &Job) -> Result<(), CliError> {
    let run = &job.config.run;
    let world_size = WorldSize::new(run.ranks).expect("a validated job has ranks");
    let deadline = Duration::from_secs_f64(run.deadline_seconds);
    let threads = threads_per_rank(run);
    thread::scope(|scope| {
        let start = |comm| scope.spawn(move || run_rank(job, comm, threads));
        let ranks: Vec<_> =
            group_with_deadline(world_size, deadline).into_iter().map(start).collect();
        let failures: Vec<_> = world_size.ranks().zip(ranks).filter_map(join).collect();
        first_cause(failures)
    })
}

/// Runs one rank; returns how it failed, if it did.
fn run_rank(job: &Job, comm: Box<dyn Communicator>, threads: usize) -> Option<Failure> {
    let rank = comm.rank();
    let pool = match rayon::ThreadPoolBuilder::new().num_threads(threads).build() {
        Ok(pool) => pool,
        Err(error) => {
            let why = format!("cannot start {threads} threads: {error}");
            return Some(Failure { rank, why, blame: Blame::Own });
        }
    };
    let error: RankError = pool.install(|| rank::run(job, comm)).err()?;
    Some(Failure::new(rank, error.blame(), &error))
}

fn join((rank, thread): (Rank, ScopedJoinHandle<'_, Option<Failure>>)) -> Option<Failure> {
    let panicked = || Failure { rank, why: "panicked".into(), blame: Blame::Own };
    thread.join().unwrap_or_else(|_| Some(panicked()))
}
