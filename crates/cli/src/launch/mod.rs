//! Starts ranks for some work, and reports the first that fails.

mod failure;
mod processes;
mod threads;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use oxizero_comm::Communicator;
use oxizero_core::config::{Launch, RunConfig};
use signal_hook::consts::SIGINT;
use signal_hook::flag::{register, register_conditional_shutdown};

pub(crate) use failure::Blame;
pub(crate) use processes::{Seat, run_seat};
pub(crate) use work::Work;

use crate::error::{CliError, INTERRUPTED};
use crate::rank::RankError;

/// Between looks at whether ranks have ended.
const POLL: Duration = Duration::from_millis(10);

/// Does `work` on all its ranks, to the end, or until the user interrupts the command.
pub(crate) fn run(work: Work) -> Result<(), CliError> {
    let interrupt = interrupt()?;
    match work.run().launch {
        Launch::Processes => processes::run(&work, &interrupt),
        Launch::Threads => {
            let run = work.run().clone();
            threads::run(&run, &interrupt, move |comm| work.perform(comm)).map(drop)
        }
    }
}

/// Calls `perform` on ranks that are threads of this process, whatever `run` has as their launch,
/// and returns what it returned on rank 0.
pub(crate) fn run_here<T: Send + 'static>(
    run: &RunConfig,
    interrupt: &AtomicBool,
    perform: impl Fn(Box<dyn Communicator>) -> Result<T, RankError> + Send + Sync + 'static,
) -> Result<T, CliError> {
    let returned = threads::run(run, interrupt, perform)?;
    Ok(returned.into_iter().next().expect("there is a rank 0"))
}

/// Is set by Ctrl-C (SIGINT); a second one ends the command at once and without words.
pub(crate) fn interrupt() -> Result<Arc<AtomicBool>, CliError> {
    let interrupt = Arc::<AtomicBool>::default();
    let again = Arc::clone(&interrupt);
    register_conditional_shutdown(SIGINT, INTERRUPTED.into(), again)
        .and_then(|_| register(SIGINT, Arc::clone(&interrupt)))
        .map_err(|error| CliError::Start(error.to_string()))?;
    Ok(interrupt)
}

/// The error of ranks that were ended by an interrupt, if there was one.
fn interrupted(interrupt: &AtomicBool) -> Result<(), CliError> {
    match interrupt.load(Relaxed) {
        true => Err(CliError::Interrupted { left: "the ranks were ended".into() }),
        false => Ok(()),
    }
}

/// Threads that each rank calculates with.
pub(crate) fn threads_per_rank(run: &RunConfig) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    run.threads_per_rank.unwrap_or((cpus / run.ranks).max(1))
}
