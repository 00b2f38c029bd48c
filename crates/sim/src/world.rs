//! Ranks as threads of one process.

use std::panic::resume_unwind;
use std::thread;

use oxizero_comm::{Communicator, threads};
use oxizero_core::WorldSize;

use crate::watched::{Log, Plan, Watched};

/// Runs `rank` on every rank of a new group, and returns what each returned, in rank order.
///
/// # Panics
///
/// If `ranks` is zero, or a rank panics: with the first one's panic.
pub fn run<T: Send>(ranks: usize, rank: impl Fn(Box<dyn Communicator>) -> T + Sync) -> Vec<T> {
    start(members(ranks), &rank)
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
            (Box::new(comm) as Box<dyn Communicator>, log)
        })
        .unzip();
    (start(members, &rank), logs)
}

fn members(ranks: usize) -> Vec<Box<dyn Communicator>> {
    threads::group(WorldSize::new(ranks).expect("a world has at least one rank"))
}

fn start<T: Send>(
    members: Vec<Box<dyn Communicator>>,
    rank: &(impl Fn(Box<dyn Communicator>) -> T + Sync),
) -> Vec<T> {
    thread::scope(|scope| {
        let spawn = |comm| scope.spawn(move || rank(comm));
        let running: Vec<_> = members.into_iter().map(spawn).collect();
        let ended: Vec<_> = running.into_iter().map(|thread| thread.join()).collect();
        ended.into_iter().map(|ended| ended.unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}
