//! Ranks as threads of this process.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use oxizero_comm::Communicator;
use oxizero_comm::threads::group_with_deadline;
use oxizero_core::config::RunConfig;
use oxizero_core::{Rank, WorldSize};

use super::failure::{Blame, Failure, first_cause};
use super::{Answer, POLL, threads_per_rank};
use crate::error::CliError;
use crate::rank::RankError;

/// Calls `perform` on every rank in a thread pool of its own, so that what it calculates runs there
/// too. Returns what the ranks returned, in their order. Ranks that are to end at once end with the
/// process, which the caller must end.
pub(super) fn run<T: Send + 'static>(
    run: &RunConfig,
    mut answer: Answer<impl FnMut() -> bool>,
    perform: impl Fn(Box<dyn Communicator>) -> Result<T, RankError> + Send + Sync + 'static,
) -> Result<Vec<T>, CliError> {
    let perform = Arc::new(perform);
    let world_size = WorldSize::new(run.ranks).expect("validated work has ranks");
    let deadline = Duration::from_secs_f64(run.deadline_seconds);
    let threads = threads_per_rank(run);
    let start = |comm| {
        let perform = Arc::clone(&perform);
        thread::spawn(move || run_rank(&*perform, comm, threads))
    };
    let ranks: Vec<_> = group_with_deadline(world_size, deadline).into_iter().map(start).collect();
    while !ranks.iter().all(JoinHandle::is_finished) {
        answer.order(); // ranks that may go on look themselves
        answer.check()?;
        thread::sleep(POLL);
    }
    let (mut returned, mut failures) = (Vec::new(), Vec::new());
    for ended in world_size.ranks().zip(ranks).map(join) {
        match ended {
            Ok(value) => returned.push(value),
            Err(failure) => failures.push(failure),
        }
    }
    first_cause(failures).map(|()| returned)
}

/// Runs one rank.
fn run_rank<T: Send>(
    perform: &(impl Fn(Box<dyn Communicator>) -> Result<T, RankError> + Sync),
    comm: Box<dyn Communicator>,
    threads: usize,
) -> Result<T, Failure> {
    let rank = comm.rank();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|error| {
        let why = format!("cannot start {threads} threads: {error}");
        Failure { rank, why, blame: Blame::Own }
    })?;
    pool.install(|| perform(comm)).map_err(|error| Failure::new(rank, error.blame(), &error))
}

fn join<T>((rank, thread): (Rank, JoinHandle<Result<T, Failure>>)) -> Result<T, Failure> {
    let panicked = || Failure { rank, why: "panicked".into(), blame: Blame::Own };
    thread.join().unwrap_or_else(|_| Err(panicked()))
}
