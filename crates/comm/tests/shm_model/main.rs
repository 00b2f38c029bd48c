//! The shared-memory synchronisation under a scheduler that tries many orders of its steps.
//!
//! The code is the crate's own, file by file; only the words that it is made of are the model's.
//! All of them are sequentially consistent, in the code and in the model.
#![allow(clippy::unwrap_used, reason = "in a test, an unwrap is an assertion")]
#![allow(dead_code, reason = "the files hold more than is modelled")]

#[path = "../../src/shm/control.rs"]
mod control;
#[path = "../../src/failure.rs"]
mod failure;
#[path = "../../src/operation.rs"]
mod operation;
#[path = "../../src/shm/signal.rs"]
mod signal;
#[path = "../../src/waits.rs"]
mod waits;
mod word;

/// Where the files look for it.
mod transport {
    pub(crate) use crate::failure::Failure;
}

use std::convert::Infallible;

use oxizero_comm::CommError;
use oxizero_core::{Numel, ProcessGroup, Rank};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::sync::Arc;
use shuttle::sync::atomic::AtomicUsize;
use shuttle::{Config, Runner, thread};

use self::control::{Holders, Meeting};
use self::operation::{Kind, Operation};
use self::signal::Signal;
use self::word::{AtomicU64, SeqCst};

/// Orders that are drawn at random, and as many that change the running thread only a few times.
const ORDERS: usize = 400;
const CHANGES: usize = 3;
/// A meeting is made on the stack, and each of its words is larger in the model.
const STACK_BYTES: usize = 1 << 20;

fn check(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let again = Arc::clone(&model);
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    let random = RandomScheduler::new(ORDERS);
    Runner::new(random, config.clone()).run(move || model());
    Runner::new(PctScheduler::new(CHANGES, ORDERS), config).run(move || again());
}

fn run(ranks: Vec<Box<dyn FnOnce() + Send>>) {
    let ranks: Vec<_> = ranks.into_iter().map(thread::spawn).collect();
    ranks.into_iter().for_each(|rank| rank.join().unwrap());
}

fn wait(signal: &Signal, value: u32, spins: u32) {
    signal.wait(value, spins, || Ok::<(), Infallible>(())).unwrap();
}

#[test]
fn nobody_sleeps_through_what_it_waits_for() {
    check(|| {
        let signal = Arc::new(Signal::default());
        let waiter = |spins| -> Box<dyn FnOnce() + Send> {
            let signal = Arc::clone(&signal);
            Box::new(move || (1..=3).for_each(|value| wait(&signal, value, spins)))
        };
        let poster = Arc::clone(&signal);
        let post = Box::new(move || (1..=3).for_each(|value| poster.post(value)));
        run(vec![waiter(0), waiter(2), post]);
    });
}

/// One rank's part of operation `sequence`, as every back end's `meet`: its bytes, here a word, are
/// read between the two signals, and its own again afterwards.
fn meet(meeting: &Meeting, group: &ProcessGroup, rank: usize, sequence: u64, bytes: &[AtomicU64]) {
    let operation = Operation { sequence, kind: Kind::Barrier, dtype: None, numel: Numel(0) };
    let value = sequence as u32;
    let seats = || meeting.seats[..group.ranks().len()].iter().zip(group.ranks());
    let place = |of: Rank| of.0 * 1000 + sequence as usize;
    let me = group.ranks()[rank];
    bytes[me.0].store(sequence, SeqCst);
    meeting.seats[rank].post(&operation, place(me)..place(me) + 1);
    seats().for_each(|(seat, _)| wait(&seat.posted, value, 1));
    let others = seats().map(|(seat, of)| (*of, seat.operation(value)));
    operation.agree(me, others).unwrap();
    for (seat, of) in seats() {
        assert_eq!(seat.offer(value), place(*of)..place(*of) + 1);
        assert_eq!(bytes[of.0].load(SeqCst), sequence);
    }
    meeting.seats[rank].read.post(value);
    seats().for_each(|(seat, _)| wait(&seat.read, value, 0));
    bytes[me.0].store(u64::MAX, SeqCst);
}

/// The same where nothing is read: it ends when all have come.
fn barrier(meeting: &Meeting, group: &ProcessGroup, rank: usize, sequence: u64) {
    let operation = Operation { sequence, kind: Kind::Barrier, dtype: None, numel: Numel(0) };
    let value = sequence as u32;
    let seats = || meeting.seats[..group.ranks().len()].iter().zip(group.ranks());
    meeting.seats[rank].post(&operation, 0..0);
    seats().for_each(|(seat, _)| wait(&seat.posted, value, 1));
    let others = seats().map(|(seat, of)| (*of, seat.operation(value)));
    operation.agree(group.ranks()[rank], others).unwrap();
    assert!(seats().all(|(seat, _)| seat.offer(value).is_empty()));
}

fn group(ranks: &[usize]) -> ProcessGroup {
    ProcessGroup::new(ranks.iter().copied().map(Rank).collect()).unwrap()
}

fn bytes() -> Arc<Vec<AtomicU64>> {
    Arc::new((0..3).map(|_| AtomicU64::new(0)).collect())
}

#[test]
fn every_member_reads_what_all_posted_for_the_same_operation() {
    check(|| {
        let (meeting, bytes) = (Arc::new(Meeting::default()), bytes());
        let member = |rank: usize| -> Box<dyn FnOnce() + Send> {
            let (meeting, bytes) = (Arc::clone(&meeting), Arc::clone(&bytes));
            Box::new(move || {
                let group = group(&[0, 1, 2]);
                for (sequence, reads) in (1..).zip([true, false, false, true, false]) {
                    match reads {
                        true => meet(&meeting, &group, rank, sequence, &bytes),
                        false => barrier(&meeting, &group, rank, sequence),
                    }
                }
            })
        };
        run((0..3).map(member).collect());
    });
}

/// Rank 1 is in both groups, and leaves the first while rank 2 already looks for the second, which
/// is opened where the first met.
#[test]
fn a_place_that_is_taken_again_is_no_invitation_to_the_group_before() {
    check(|| {
        let (meeting, bytes) = (Arc::new(Meeting::default()), bytes());
        let member = |groups: Vec<(ProcessGroup, usize)>| -> Box<dyn FnOnce() + Send> {
            let (meeting, bytes) = (Arc::clone(&meeting), Arc::clone(&bytes));
            Box::new(move || {
                for (group, rank) in groups {
                    let comes = || match rank {
                        0 => meeting.open(&group),
                        _ => meeting.awaits(&group, Rank(rank)),
                    };
                    while !comes() {
                        thread::yield_now();
                    }
                    meeting.join(Rank(rank));
                    meet(&meeting, &group, rank, 1, &bytes);
                    meeting.leave(&group, Rank(rank));
                }
            })
        };
        let [first, second] = [group(&[0, 1]), group(&[1, 2])];
        run(vec![
            member(vec![(first.clone(), 0)]),
            member(vec![(first, 1), (second.clone(), 0)]),
            member(vec![(second, 1)]),
        ]);
    });
}

#[test]
fn a_replica_is_cleared_once_and_handed_out_again_only_then() {
    check(|| {
        let holders = Arc::new(Holders::default());
        let cleared = Arc::new(AtomicUsize::new(0));
        assert!(holders.claim(2));
        let holder = || -> Box<dyn FnOnce() + Send> {
            let (holders, cleared) = (Arc::clone(&holders), Arc::clone(&cleared));
            Box::new(move || holders.release(|| cleared.fetch_add(1, SeqCst) == 0))
        };
        let (owner, clears) = (Arc::clone(&holders), Arc::clone(&cleared));
        let reclaim = Box::new(move || {
            while !owner.reclaim() {
                thread::yield_now();
            }
            assert_eq!(clears.load(SeqCst), 1);
            assert!(owner.claim(1));
        });
        run(vec![holder(), holder(), reclaim]);
    });
}
