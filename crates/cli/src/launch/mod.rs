//! Starts ranks for some work, and reports the first that fails.

mod failure;
mod processes;
mod threads;
mod work;

use oxizero_core::config::{Launch, RunConfig};

pub(crate) use failure::Blame;
pub(crate) use processes::{Seat, run_seat};
pub(crate) use work::Work;

use crate::error::CliError;

/// Does `work` on all its ranks, to the end.
pub(crate) fn run(work: &Work) -> Result<(), CliError> {
    match work.run().launch {
        Launch::Processes => processes::run(work),
        Launch::Threads => threads::run(work),
    }
}

/// Threads that each rank calculates with.
pub(crate) fn threads_per_rank(run: &RunConfig) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    run.threads_per_rank.unwrap_or((cpus / run.ranks).max(1))
}
