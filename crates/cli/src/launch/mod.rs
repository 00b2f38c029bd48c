//! Starts the ranks of a job, and reports the first that fails.

mod failure;
mod processes;
mod threads;

use oxizero_core::config::{Launch, RunConfig};

pub(crate) use failure::Blame;
pub(crate) use processes::{Seat, run_seat};

use crate::error::CliError;
use crate::job::Job;

/// Runs `job` on all its ranks, to the end.
pub(crate) fn run(job: &Job) -> Result<(), CliError> {
    match job.config.run.launch {
        Launch::Processes => processes::run(job),
        Launch::Threads => threads::run(job),
    }
}

/// Threads that each rank calculates with.
pub(crate) fn threads_per_rank(run: &RunConfig) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    run.threads_per_rank.unwrap_or((cpus / run.ranks).max(1))
}
