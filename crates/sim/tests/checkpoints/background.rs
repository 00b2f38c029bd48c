//! A save that threads do while training goes on.

use oxizero::{EngineError, RunFolder, SaveOptions};
use oxizero_checkpoint::CheckpointError;
use oxizero_core::Stage;
use oxizero_sim::drawn;
use oxizero_sim::opaque::Opaque;
use oxizero_sim::trial::Trial;
use oxizero_sim::world;

use super::{contents, load, save, state_of, train};

fn in_background(engine: &mut oxizero::Engine, run: &RunFolder, name: Option<&str>) {
    let options = SaveOptions { name: name.map(Into::into), ..SaveOptions::default() };
    engine.save_in_background(run, &options).unwrap();
}

#[test]
fn it_saves_what_there_was_when_it_was_called() {
    for seed in 0..24 {
        println!("seed {seed}");
        let trial = drawn::any(seed);
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [first, second] = folders.each_ref().map(|folder| folder.path());
        let device = Opaque::default();
        world::run(trial.ranks, |comm| {
            let member = match seed % 4 {
                0 => trial.member_on(&device, comm).unwrap(),
                _ => trial.member(comm).unwrap(),
            };
            let mut engine = trial.start_of(member).unwrap();
            train(&trial, &mut engine, 0..2);
            save(&mut engine, first).unwrap();
            in_background(&mut engine, &RunFolder::new(second), None);
            train(&trial, &mut engine, 2..5);
            engine.finish_save().unwrap();
            assert_eq!(engine.finish_save().unwrap(), None);
        });
        assert_eq!(contents(second), contents(first), "seed {seed}");
    }
}

#[test]
fn a_save_changes_no_bit_of_the_training_around_it() {
    for stage in Stage::ALL {
        let trial = Trial { ranks: 3, ..super::errors::large(stage) };
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::new(folder.path());
        let states = [true, false].map(|saves| {
            world::run(3, |comm| {
                let mut engine = trial.start(comm).unwrap();
                for step in 0..8 {
                    if saves {
                        in_background(&mut engine, &run, None);
                    }
                    train(&trial, &mut engine, step..step + 1);
                }
                engine.finish_save().unwrap();
                state_of(&trial, &mut engine)
            })
        });
        assert_eq!(states[0], states[1], "{stage:?}");
        assert_eq!(run.checkpoints().unwrap().len(), 8);
    }
}

#[test]
fn the_next_save_and_a_load_wait_for_it() {
    let trial = Trial { ranks: 2, ..super::errors::large(Stage::Zero2) };
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path());
    world::run(2, |comm| {
        let mut engine = trial.start(comm).unwrap();
        for name in ["a", "b"] {
            in_background(&mut engine, &run, Some(name));
        }
        assert_eq!(run.latest().unwrap(), "a");
        load(&mut engine, folder.path()).unwrap();
        assert_eq!(run.latest().unwrap(), "b");
        in_background(&mut engine, &run, Some("c"));
        let saved = engine.finish_save().unwrap();
        assert_eq!(saved, Some(folder.path().join("c")));
    });
}

/// Saves in a process whose files may not be so large; called there by the test of a full disk.
pub(super) fn fails_on_a_full_disk(trial: &Trial, folder: &std::path::Path) {
    world::run(trial.ranks, |comm| {
        let mut engine = trial.start(comm).unwrap();
        load(&mut engine, folder).unwrap();
        in_background(&mut engine, &RunFolder::new(folder), None);
        let mut failed = None;
        for step in 0.. {
            trial.micro_batch(&mut engine, step, 0).unwrap();
            if let Err(error) = engine.step() {
                failed = Some(error);
                engine.step().unwrap();
                break;
            }
        }
        let error = failed.unwrap();
        let is_io = matches!(error, EngineError::Checkpoint(CheckpointError::Io { .. }));
        assert!(is_io || matches!(error, EngineError::PeerRefused { .. }), "{error}");
        assert_eq!(engine.finish_save().unwrap(), None);
    });
}
