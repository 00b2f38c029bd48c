//! Starts ranks for some work, and reports the first that fails.

mod answer;
mod failure;
mod processes;
mod threads;
mod work;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use oxizero_comm::Communicator;
use oxizero_core::config::{Launch, RunConfig};
use signal_hook::consts::SIGINT;
use signal_hook::flag::{register, register_conditional_shutdown};

pub(crate) use failure::Blame;
pub(crate) use processes::{Seat, run_seat};
pub(crate) use work::Work;

use self::answer::Answer;
use crate::error::{CliError, INTERRUPTED};
use crate::rank::RankError;

/// Between looks at whether ranks have ended.
const POLL: Duration = Duration::from_millis(10);

/// Does `work` on all its ranks, to the end, or until the user interrupts the command.
pub(crate) fn run(work: Work) -> Result<(), CliError> {
    let (interrupt, work) = (interrupt()?, Arc::new(work));
    let answer = Answer::new(Arc::clone(&interrupt), work.may_go_on());
    match work.run().launch {
        Launch::Processes => processes::run(&work, answer),
        Launch::Threads => {
            let its = Arc::clone(&work);
            let perform = move |comm| its.perform(comm, &interrupt);
            threads::run(work.run(), answer, perform).map(drop)
        }
    }
}

/// Calls `perform` on ranks that are threads of this process, whatever `run` has as their launch,
/// and returns what it returned on rank 0.
pub(crate) fn run_here<T: Send + 'static>(
    run: &RunConfig,
    interrupt: &Arc<AtomicBool>,
    perform: impl Fn(Box<dyn Communicator>) -> Result<T, RankError> + Send + Sync + 'static,
) -> Result<T, CliError> {
    let answer = Answer::new(Arc::clone(interrupt), || false);
    let returned = threads::run(run, answer, perform)?;
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

/// Threads that each rank calculates with.
pub(crate) fn threads_per_rank(run: &RunConfig) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    run.threads_per_rank.unwrap_or((cpus / run.ranks).max(1))
}
