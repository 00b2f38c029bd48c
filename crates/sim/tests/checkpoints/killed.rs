//! A run that is killed while it saves, fifty times, each time at another moment: what it goes on
//! from is what it had.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use oxizero::{EngineOptions, GroupOptions, RunFolder, SaveOptions};
use oxizero_core::{DType, Precision, Random, Stage};
use oxizero_sim::odd::ADAMW;
use oxizero_sim::trial::Trial;
use oxizero_sim::world;

use super::{State, backward, load, state_of, train};

const KILLS: u64 = 50;
const RANKS: usize = 2;
/// A run lives at most as long as its first save took, times this, after that.
const LIFE_SAVES: f64 = 4.0;
/// The folder that a run saves in, in the process that is killed.
const SAVES_IN: &str = "OXIZERO_TEST_SAVES_IN";
/// What that process says before and after its first save.
const BEGINS: &str = "the first save begins";
const ENDS: &str = "the first save has ended";

fn trial() -> Trial {
    let options = EngineOptions::new(Stage::Zero2, Precision::of_model(DType::Bf16));
    let weights: Vec<f32> = (0..3000).map(|index| index as f32).collect();
    let trial = Trial::new(options, &[("a", &weights), ("b", &weights[..999])], backward);
    let groups = vec![GroupOptions { lr: 0.01, weight_decay: 0.1 }];
    Trial { ranks: RANKS, rule: ADAMW, groups, ..trial }
}

/// Trains from the latest checkpoint on, and saves after every step, until it is killed.
#[test]
fn a_run_that_is_killed() {
    let Some(folder) = std::env::var_os(SAVES_IN) else { return };
    let (run, trial) = (RunFolder::new(PathBuf::from(folder)), trial());
    world::run(RANKS, |comm| {
        let rank = comm.rank().0;
        let mut engine = trial.start(comm).unwrap();
        if run.latest().is_ok() {
            load(&mut engine, run.path()).unwrap();
        }
        let options = SaveOptions { keep_last: Some(2), ..SaveOptions::default() };
        let first = engine.applied_steps() as usize;
        for step in first..100_000 {
            let says = |text: &str| {
                if (rank, step) == (0, first) {
                    println!("{text}");
                }
            };
            train(&trial, &mut engine, step..step + 1);
            says(BEGINS);
            engine.save(&run, &options).unwrap();
            says(ENDS);
        }
    });
}

/// A run that saves in that folder.
fn started(folder: &Path) -> (Child, impl FnMut(&str) -> bool) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "killed::a_run_that_is_killed", "--nocapture"])
        .env(SAVES_IN, folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, move |text: &str| lines.any(|line| line.unwrap().contains(text)))
}

/// Lets a run begin, and kills it after a part of the time that it may live.
fn run_and_kill(folder: &Path, part: f64) {
    let (mut child, mut said) = started(folder);
    assert!(said(BEGINS), "the run ended by itself: it cannot load what is there");
    let begun = Instant::now();
    assert!(said(ENDS), "the run cannot save");
    thread::sleep(begun.elapsed().mul_f64(LIFE_SAVES * part));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// What a rank has after each of these steps.
fn straight(steps: &[u64]) -> Vec<State> {
    let trial = trial();
    let mut of_ranks = world::run(RANKS, |comm| {
        let mut engine = trial.start(comm).unwrap();
        let mut at = 0;
        let state = |step: &u64| {
            train(&trial, &mut engine, at..*step as usize);
            at = *step as usize;
            state_of(&trial, &mut engine)
        };
        steps.iter().map(state).collect::<Vec<_>>()
    });
    of_ranks.swap_remove(0)
}

#[test]
fn a_run_that_is_killed_in_its_first_save_begins_anew() {
    let trial = trial();
    for delay in 0..10 {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::new(folder.path());
        let (mut child, mut said) = started(folder.path());
        assert!(said(BEGINS), "the run ended by itself");
        thread::sleep(Duration::from_micros(500 * delay));
        child.kill().unwrap();
        child.wait().unwrap();
        if let Err(error) = run.latest() {
            let there = ["nothing was saved there", "by name there is: step-000001"];
            assert!(there.iter().any(|words| error.to_string().contains(words)), "{error}");
        }
        run_and_kill(folder.path(), 0.0);
        world::run(RANKS, |comm| {
            let mut engine = trial.start(comm).unwrap();
            load(&mut engine, folder.path()).unwrap();
        });
    }
}

#[test]
fn a_run_that_is_killed_at_any_moment_goes_on_from_a_whole_checkpoint() {
    let (folder, trial) = (tempfile::tempdir().unwrap(), trial());
    let (mut found, mut in_a_save) = (Vec::new(), 0);
    for seed in 0..KILLS {
        let drawn = Random::for_path(seed, &[50]).next_u64();
        run_and_kill(folder.path(), drawn as f64 / u64::MAX as f64);
        let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
        in_a_save += names.filter(|name| name.to_str().unwrap().contains(".partial-")).count();
        let state = world::run(RANKS, |comm| {
            let mut engine = trial.start(comm).unwrap();
            load(&mut engine, folder.path()).unwrap();
            state_of(&trial, &mut engine)
        });
        found.extend(state.into_iter().take(1));
    }
    let steps: Vec<_> = found.iter().map(|state| state.applied_steps).collect();
    println!("{in_a_save} of {KILLS} were in the middle of a save; steps {steps:?}");
    assert!(steps.is_sorted_by(|earlier, later| earlier < later));
    assert!(in_a_save > 0, "no kill met a save");
    assert!(found == straight(&steps), "a checkpoint has other numbers than the run had");
}
