//! What cannot be saved or loaded is refused on every rank, and the engine is as it was.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use oxizero::{
    EngineError, EngineOptions, GroupOptions, LoadOptions, Names, RunFolder, SaveOptions,
};
use oxizero_checkpoint::CheckpointError;
use oxizero_core::{Bytes, DType, Precision, Stage, UnitId};
use oxizero_sim::odd::{ADAMW, LION, SGD};
use oxizero_sim::trial::Trial;
use oxizero_sim::world;

use super::{load, save, state_of, train};

const RANKS: usize = 2;

fn of_params(stage: Stage, params: &[(&str, &[f32])]) -> Trial {
    let options = EngineOptions {
        align: Bytes(1),
        ..EngineOptions::new(stage, Precision::of_model(DType::Bf16))
    };
    let backward = |_, weights: &[f32]| vec![weights.to_vec()];
    let trial = Trial::new(options, params, backward);
    let groups = vec![GroupOptions { lr: 0.125, weight_decay: 0.5 }];
    Trial { ranks: RANKS, rule: ADAMW, groups, ..trial }
}

fn two(stage: Stage) -> Trial {
    of_params(stage, &[("a", &[1.0, 2.0, 3.0, 4.0]), ("b", &[5.0; 6])])
}

/// A checkpoint of the trial after two steps.
fn saved(trial: &Trial) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    world::run(trial.ranks, |comm| {
        let mut engine = trial.start(comm).unwrap();
        train(trial, &mut engine, 0..2);
        save(&mut engine, folder.path()).unwrap();
    });
    folder
}

/// Loads on every rank, asserts that the engine is as it was, and returns the errors.
fn refused(trial: &Trial, folder: &Path) -> Vec<EngineError> {
    world::run(trial.ranks, |comm| {
        let mut engine = trial.start(comm).unwrap();
        train(trial, &mut engine, 0..1);
        let before = state_of(trial, &mut engine);
        let error = load(&mut engine, folder).unwrap_err();
        assert_eq!(state_of(trial, &mut engine), before);
        train(trial, &mut engine, 1..2);
        error
    })
}

#[test]
fn names_that_differ_are_refused_or_listed() {
    let stored = of_params(Stage::Zero1, &[("a", &[1.0, 2.0, 3.0, 4.0]), ("old", &[9.0])]);
    let (folder, trial) = (saved(&stored), two(Stage::Zero2));
    for error in refused(&trial, folder.path()) {
        let EngineError::NamesDiffer { missing, unexpected } = &error else { panic!("{error}") };
        let of = |name: &str| {
            let states = ["exp_avg", "exp_avg_sq"];
            states.map(|state| format!("the optimizer state `{state}` of `{name}`")).to_vec()
        };
        let first = |text: &str, name| [vec![text.to_owned()], of(name)].concat();
        assert_eq!(*missing, first("the weights of `b`", "b"));
        assert_eq!(*unexpected, first("the master weights of `old`", "old"));
        assert!(error.to_string().contains("Names::Listed"), "{error}");
    }
    world::run(RANKS, |comm| {
        let mut engine = trial.start(comm).unwrap();
        let options = LoadOptions { names: Names::Listed, ..LoadOptions::default() };
        let loaded = engine.load(&RunFolder::new(folder.path()), None, options).unwrap();
        assert_eq!((loaded.missing.len(), loaded.unexpected.len()), (3, 3));
        let weights = trial.weights(&mut engine).unwrap();
        assert!(weights[0] != trial.initial[0] && weights[1] == trial.initial[1], "{weights:?}");
    });
}

#[test]
fn another_optimizers_states_are_refused_by_name() {
    let trial = two(Stage::Zero3);
    let folder = saved(&Trial { rule: SGD, ..trial.clone() });
    for error in refused(&Trial { rule: LION, ..trial }, folder.path()) {
        let text = error.to_string();
        assert!(text.contains("`exp_avg` of `a`") && text.contains("`momentum_buffer`"), "{text}");
    }
}

#[test]
fn a_tensor_of_another_shape_is_refused() {
    let folder = saved(&two(Stage::Zero1));
    let trial = of_params(Stage::Zero1, &[("a", &[1.0, 2.0, 3.0, 4.0]), ("b", &[5.0; 7])]);
    for error in refused(&trial, folder.path()) {
        let text = error.to_string();
        assert!(text.contains("the master weights of `b`: it has the shape [6]"), "{text}");
    }
}

#[test]
fn a_save_in_the_middle_of_a_window_is_refused() {
    let trial = two(Stage::Zero2);
    let folder = tempfile::tempdir().unwrap();
    world::run(RANKS, |comm| {
        let mut engine = trial.start(comm).unwrap();
        trial.micro_batch(&mut engine, 0, 0).unwrap();
        let error = save(&mut engine, folder.path()).unwrap_err();
        assert!(matches!(error, EngineError::InWindow { call: "save" }), "{error}");
        engine.step().unwrap();
        save(&mut engine, folder.path()).unwrap();
    });
}

#[test]
fn weights_that_somebody_views_are_not_overwritten() {
    let trial = two(Stage::Zero1);
    let folder = saved(&trial);
    world::run(RANKS, |comm| {
        let rank = comm.rank().0;
        let mut engine = trial.start(comm).unwrap();
        let held = (rank == 1).then(|| engine.unit_weights(UnitId(0)).unwrap());
        let error = load(&mut engine, folder.path()).unwrap_err();
        match rank {
            1 => assert!(matches!(error, EngineError::WeightsInUse { .. }), "{error}"),
            _ => assert!(matches!(error, EngineError::PeerRefused { .. }), "{error}"),
        }
        drop(held);
        load(&mut engine, folder.path()).unwrap();
    });
}

#[test]
fn ranks_that_save_or_load_different_checkpoints_hear_of_it() {
    let trial = two(Stage::Zero1);
    let folder = saved(&trial);
    world::run(RANKS, |comm| {
        let rank = comm.rank().0;
        let run = RunFolder::new(folder.path());
        let mut engine = trial.start(comm).unwrap();
        let options = SaveOptions { name: Some(format!("rank-{rank}")), ..SaveOptions::default() };
        let error = engine.save(&run, &options).unwrap_err();
        assert!(matches!(error, EngineError::CallsDiffer { .. }), "{error}");
        let name = (rank == 0).then_some("step-000002");
        let error = engine.load(&run, name, LoadOptions::default()).unwrap_err();
        assert!(matches!(error, EngineError::CallsDiffer { .. }), "{error}");
        load(&mut engine, folder.path()).unwrap();
    });
}

/// The path and the bytes of the file that rank 1 wrote.
fn second_file(folder: &Path) -> (PathBuf, Vec<u8>) {
    let path = folder.join("step-000002").join("pieces-00001.safetensors");
    let bytes = fs::read(&path).unwrap();
    (path, bytes)
}

#[test]
fn a_missing_file_is_an_error_of_all_and_changes_nothing() {
    let trial = two(Stage::Zero3);
    let folder = saved(&trial);
    fs::remove_file(second_file(folder.path()).0).unwrap();
    for error in refused(&trial, folder.path()) {
        assert!(error.to_string().contains("pieces-00001.safetensors"), "{error}");
    }
}

#[test]
fn elements_that_are_damaged_stop_training_until_another_checkpoint_is_loaded() {
    for stage in Stage::ALL {
        let trial = two(stage);
        let folder = saved(&trial);
        let (path, good) = second_file(folder.path());
        let mut damaged = good.clone();
        *damaged.last_mut().unwrap() ^= 1;
        world::run(RANKS, |comm| {
            let rank = comm.rank().0;
            let mut engine = trial.start(comm).unwrap();
            if rank == 0 {
                fs::write(&path, &damaged).unwrap();
            }
            engine.communicator().barrier().unwrap();
            match load(&mut engine, folder.path()).unwrap_err() {
                EngineError::Checkpoint(CheckpointError::Tensor { tensor, file, .. }) => {
                    assert!(tensor.contains("`b`") && file.contains("pieces-00001"), "{tensor}");
                }
                EngineError::PeerRefused { rank: other } => {
                    assert_eq!((rank, other.0), (0, 1), "rank 1 alone reads it");
                    assert!(stage >= Stage::Zero1);
                }
                other => panic!("{other}"),
            }
            let error = save(&mut engine, folder.path()).unwrap_err();
            assert!(matches!(error, EngineError::HalfLoaded), "{error}");
            assert!(trial.window(&mut engine, 2).is_err());
            if rank == 0 {
                fs::write(&path, &good).unwrap();
            }
            engine.communicator().barrier().unwrap();
            load(&mut engine, folder.path()).unwrap();
            train(&trial, &mut engine, 2..3);
        });
    }
}

/// In a process whose files may not be so large, as if the disk were full.
const FULL_DISK: &str = "OXIZERO_TEST_FULL_DISK";

pub(super) fn large(stage: Stage) -> Trial {
    of_params(stage, &[("a", &[1.0; 50_000]), ("b", &[5.0; 6])])
}

#[test]
fn a_full_disk_is_an_error_of_all_and_the_old_checkpoint_stays() {
    let trial = large(Stage::Zero2);
    let folder = saved(&trial);
    let script = "trap '' XFSZ; ulimit -f 100; exec \"$0\" \"$@\"";
    let program = std::env::current_exe().unwrap();
    // What it prints goes through a pipe: a file may have that size already.
    let output = Command::new("sh")
        .args(["-c", script])
        .arg(program)
        .args(["--exact", "errors::on_a_full_disk", "--nocapture"])
        .env(FULL_DISK, folder.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let found = RunFolder::new(folder.path()).checkpoints().unwrap();
    assert_eq!(found, ["step-000002"]);
    let entries = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(entries, 2, "nothing is left of the save that failed");
}

#[test]
fn on_a_full_disk() {
    let Some(folder) = std::env::var_os(FULL_DISK) else { return };
    let (folder, trial) = (PathBuf::from(folder), large(Stage::Zero2));
    let errors = world::run(RANKS, |comm| {
        let mut engine = trial.start(comm).unwrap();
        load(&mut engine, &folder).unwrap();
        let before = state_of(&trial, &mut engine);
        train(&trial, &mut engine, 2..3);
        let error = save(&mut engine, &folder).unwrap_err();
        load(&mut engine, &folder).unwrap();
        assert_eq!(state_of(&trial, &mut engine), before);
        error
    });
    for error in errors {
        let is_io = matches!(error, EngineError::Checkpoint(CheckpointError::Io { .. }));
        assert!(is_io || matches!(error, EngineError::PeerRefused { .. }), "{error}");
    }
    super::background::fails_on_a_full_disk(&trial, &folder);
}
