//! Ranks as threads of this process.

use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use oxizero_comm::Communicator;
use oxizero_comm::threads::group_with_deadline;
use oxizero_core::{Rank, WorldSize};

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
        let ends: Vec<_> = ranks.into_iter().map(join).collect();
        first_cause(ends)
    })
}

/// How a rank's thread failed.
struct Failure {
    why: String,
    /// Only because another rank failed before.
    is_consequence: bool,
}

fn run_rank(job: &Job, comm: Box<dyn Communicator>, threads: usize) -> Result<(), Failure> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
    let pool = pool.map_err(|error| Failure {
        why: format!("cannot start {threads} threads: {error}"),
        is_consequence: false,
    })?;
    pool.install(|| rank::run(job, comm)).map_err(|error: RankError| Failure {
        is_consequence: error.is_consequence(),
        why: format!("failed: {error}"),
    })
}

fn join(rank: ScopedJoinHandle<'_, Result<(), Failure>>) -> Result<(), Failure> {
    let panicked = || Failure { why: "panicked".into(), is_consequence: false };
    rank.join().unwrap_or_else(|_| Err(panicked()))
}

fn first_cause(ends: Vec<Result<(), Failure>>) -> Result<(), CliError> {
    let failures = ends.into_iter().enumerate();
    let failures = failures.filter_map(|(rank, end)| Some((Rank(rank), end.err()?)));
    let cause = failures.min_by_key(|(_, failure)| failure.is_consequence);
    match cause {
        Some((rank, Failure { why, .. })) => Err(CliError::Rank { rank, why }),
        None => Ok(()),
    }
}
