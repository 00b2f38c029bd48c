//! A run that stopped and went on is the run that did not stop, to the bit.

use oxizero_sim::drawn;
use oxizero_sim::opaque::Opaque;
use oxizero_sim::trial::Trial;
use oxizero_sim::world;

use super::{load, save, state_of, train};

const SEEDS: u64 = 80;
const STEPS: usize = 6;

/// Trains with a stop after `stop` steps, in engines that `start` makes.
fn assert_resumes(trial: &Trial, stop: usize, on_device: bool, context: &str) {
    let device = Opaque::default();
    let start = |comm| {
        let member = match on_device {
            true => trial.member_on(&device, comm).unwrap(),
            false => trial.member(comm).unwrap(),
        };
        trial.start_of(member).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let first = world::run(trial.ranks, |comm| {
        let mut engine = start(comm);
        let outcomes = train(trial, &mut engine, 0..stop);
        save(&mut engine, folder.path()).unwrap();
        outcomes
    });
    let resumed = world::run(trial.ranks, |comm| {
        let mut engine = start(comm);
        // What an engine did before it loads does not count, nor does a window that has begun.
        train(trial, &mut engine, 0..1);
        trial.micro_batch(&mut engine, 1, 0).unwrap();
        load(&mut engine, folder.path()).unwrap();
        let outcomes = train(trial, &mut engine, stop..STEPS);
        (outcomes, state_of(trial, &mut engine))
    });
    let straight = world::run(trial.ranks, |comm| {
        let mut engine = start(comm);
        let outcomes = train(trial, &mut engine, 0..STEPS);
        (outcomes, state_of(trial, &mut engine))
    });
    for ((first, resumed), straight) in first.into_iter().zip(resumed).zip(straight) {
        let outcomes = [first, resumed.0].concat();
        let shown = |outcomes: &[_]| format!("{outcomes:?}"); // a NaN is itself
        assert_eq!(shown(&outcomes), shown(&straight.0), "{context}");
        assert_eq!(resumed.1, straight.1, "{context}");
    }
}

#[test]
fn whatever_is_drawn_goes_on_to_the_bit() {
    for seed in 0..SEEDS {
        println!("seed {seed}"); // the last one that is printed is the one that failed
        let trial = drawn::any(seed);
        let stop = 1 + seed as usize % (STEPS - 1);
        assert_resumes(&trial, stop, seed % 4 == 0, &format!("seed {seed}"));
    }
}

#[test]
fn ranks_that_share_replicas_go_on_too() {
    for seed in 0..12 {
        println!("seed {seed}");
        let trial = drawn::any(seed);
        let folder = tempfile::tempdir().unwrap();
        let straight = world::run_shared(trial.ranks, |comm| {
            let mut engine = trial.start(comm).unwrap();
            train(&trial, &mut engine, 0..2);
            save(&mut engine, folder.path()).unwrap();
            train(&trial, &mut engine, 2..4);
            state_of(&trial, &mut engine)
        });
        let resumed = world::run_shared(trial.ranks, |comm| {
            let mut engine = trial.start(comm).unwrap();
            load(&mut engine, folder.path()).unwrap();
            train(&trial, &mut engine, 2..4);
            state_of(&trial, &mut engine)
        });
        assert_eq!(resumed.unwrap(), straight.unwrap(), "seed {seed}");
    }
}
