//! Ranks as threads of one process.

use std::panic::resume_unwind;
use std::thread;

use oxizero_comm::{Beside, CommError, Communicator, overlapped, shm, threads};
use oxizero_core::{Overlap, WorldSize};

use crate::watched::{Log, Plan, Watched};

/// Runs `rank` on every rank of a new group, and returns what each returned, in rank order.
///
/// # Panics
///
/// If `ranks` is zero, or a rank panics: with the first one's panic.
pub fn run<T: Send>(ranks: usize, rank: impl Fn(Box<dyn Communicator>) -> T + Sync) -> Vec<T> {
    start(members(ranks), &rank)
}

/// As [`run`], with every rank's operations on a thread of their own.
pub fn run_overlapped<T: Send>(
    ranks: usize,
    rank: impl Fn(Box<dyn Communicator>) -> T + Sync,
) -> Vec<T> {
    let members = members(ranks).into_iter().map(|comm| placed(comm, Overlap::On));
    start(members.collect(), &rank)
}

/// As [`run`], with every rank's communicator watched under `plan`. The logs tell what each rank
/// asked for.
pub fn run_watched<T: Send>(
    ranks: usize,
    plan: Plan,
    rank: impl Fn(Box<dyn Communicator>) -> T + Sync,
) -> (Vec<T>, Vec<Log>) {
    let watched = members(ranks).into_iter().map(|comm| Watched::new(comm, plan));
    let (members, logs): (Vec<_>, Vec<_>) = watched
        .map(|comm| {
            let log = comm.log();
            (placed(Box::new(comm), plan.overlap), log)
        })
        .unzip();
    (start(members, &rank), logs)
}

/// As [`run`], over the back end of processes: each rank maps the shared memory for itself, and
/// all of them read one copy of replicated weights.
///
/// # Errors
///
/// Of any rank that cannot join.
pub fn run_shared<T: Send>(
    ranks: usize,
    rank: impl Fn(Box<dyn Communicator>) -> T + Sync,
) -> Result<Vec<T>, CommError> {
    let folder = tempfile::tempdir()
        .map_err(|error| CommError::System { operation: "tempdir", why: error.to_string() })?;
    let socket = folder.path().join("socket");
    let world_size = WorldSize::new(ranks).expect("a world has at least one rank");
    let joins = world_size.ranks().map(|rank| shm::Options::new(rank, world_size, &socket));
    let join = |options| shm::connect(options).map(&rank);
    start(joins.collect(), &join).into_iter().collect()
}

fn members(ranks: usize) -> Vec<Box<dyn Communicator>> {
    threads::group(WorldSize::new(ranks).expect("a world has at least one rank"))
}

/// The communicator, with its operations on a thread of their own if that is asked for.
///
/// # Panics
///
/// If the system gives no thread.
pub fn placed(comm: Box<dyn Communicator>, overlap: Overlap) -> Box<dyn Communicator> {
    match overlap {
        Overlap::Off => comm,
        Overlap::On => overlapped(comm, Beside::default()).expect("the system gives a thread"),
    }
}

/// One thread a member.
fn start<M: Send, T: Send>(members: Vec<M>, rank: &(impl Fn(M) -> T + Sync)) -> Vec<T> {
    thread::scope(|scope| {
        let spawn = |member| scope.spawn(move || rank(member));
        let running: Vec<_> = members.into_iter().map(spawn).collect();
        let ended: Vec<_> = running.into_iter().map(|thread| thread.join()).collect();
        ended.into_iter().map(|ended| ended.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}
