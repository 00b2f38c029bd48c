//! A checkpoint is there whole or not at all.

use std::fs;

use oxizero_checkpoint::{CheckpointError, RunFolder, Value, step_name};

use crate::sample::{manifest, pieces, read, save};

fn step_of(run: &RunFolder) -> u64 {
    run.open(None).unwrap().manifest().training.applied_steps
}

#[test]
fn until_a_save_is_committed_the_latest_is_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path().join("new").join("run"));
    save(&run, &step_name(1), 1).unwrap();
    let staging = run.begin(&step_name(2), 77).unwrap();
    assert_eq!((run.latest().unwrap(), step_of(&run)), (step_name(1), 1));
    let manifest = manifest(2);
    for writer in 0..2 {
        let planned = pieces(&manifest, writer);
        let mut fill = |_, _, bytes: &mut [u8]| bytes.fill(1);
        staging.write(writer, Value::Null, &manifest, &planned, &mut fill).unwrap();
    }
    assert_eq!((run.checkpoints().unwrap(), step_of(&run)), (vec![step_name(1)], 1));
    // Two of three writers do not make a checkpoint, whatever is claimed.
    assert!(staging.commit(manifest.clone(), 3).is_err());
    let error = staging.commit(manifest, 2).unwrap_err();
    assert!(error.to_string().contains("share-00000.json"), "{error}");
    assert_eq!((run.checkpoints().unwrap(), step_of(&run)), (vec![step_name(1)], 1));
    // The next save takes away what this one has left.
    save(&run, &step_name(3), 3).unwrap();
    assert_eq!(run.checkpoints().unwrap(), [step_name(1), step_name(3)]);
    assert_eq!(fs::read_dir(run.path()).unwrap().count(), 3, "two checkpoints and `latest`");
    assert_eq!(step_of(&run), 3);
}

#[test]
fn pieces_that_do_not_fill_a_tensor_are_not_committed() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path());
    let staging = run.begin(&step_name(1), 1).unwrap();
    let manifest = manifest(1);
    let planned = pieces(&manifest, 1);
    staging.write(0, Value::Null, &manifest, &planned, &mut |_, _, _| ()).unwrap();
    let error = staging.commit(manifest, 1).unwrap_err();
    assert!(error.to_string().contains("the master weights of `a`"), "{error}");
    assert!(run.open(None).is_err());
}

#[test]
fn a_checkpoint_of_the_same_name_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path());
    for step in [4, 9] {
        let saved = save(&run, "mine", step).unwrap();
        assert_eq!(read(&saved).unwrap().0.training.applied_steps, step);
    }
    assert_eq!(run.checkpoints().unwrap(), ["mine"]);
    assert_eq!(fs::read_dir(run.path()).unwrap().count(), 2);
    fs::create_dir(folder.path().join("photos")).unwrap();
    let error = save(&run, "photos", 1).unwrap_err();
    assert!(error.to_string().contains("is no checkpoint"), "{error}");
}

#[test]
fn the_last_are_kept_and_names_of_ones_own_too() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path());
    // A run that went back to an older step: what counts is when, not what.
    for name in ["mine", "step-000009", "step-000002", "step-000003", "step-x", "step-000004"] {
        save(&run, name, 1).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    run.keep_last(2).unwrap();
    assert_eq!(run.checkpoints().unwrap(), ["mine", "step-000003", "step-x", "step-000004"]);
    run.keep_last(0).unwrap();
    assert_eq!(run.checkpoints().unwrap(), ["mine", "step-x", "step-000004"]);
    assert_eq!(run.latest().unwrap(), "step-000004");
}

#[test]
fn names_are_not_paths() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path().join("run"));
    for name in ["../x", "a/b", "", ".", "..", "latest", "a.partial-1"] {
        let error = save(&run, name, 1).unwrap_err();
        assert!(matches!(error, CheckpointError::Name { .. }), "{error}");
        assert!(matches!(run.open(Some(name)), Err(CheckpointError::Name { .. })));
    }
    assert!(!run.path().exists());
    save(&run, "fine", 1).unwrap();
    fs::write(run.path().join("latest"), "../run/fine\n").unwrap();
    assert!(matches!(run.open(None), Err(CheckpointError::Name { .. })));
}

#[test]
fn a_folder_without_checkpoints_says_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path());
    let error = run.open(None).unwrap_err().to_string();
    assert!(error.contains("nothing was saved there"), "{error}");
    save(&run, "mine", 1).unwrap();
    fs::remove_file(folder.path().join("latest")).unwrap();
    let error = run.open(None).unwrap_err().to_string();
    assert!(error.contains("by name there is: mine"), "{error}");
    assert!(matches!(run.open(Some("other")), Err(CheckpointError::NoCheckpoint { .. })));
}

#[test]
fn a_write_that_fails_is_an_error_and_the_old_checkpoint_stays() {
    let folder = tempfile::tempdir().unwrap();
    let run = RunFolder::new(folder.path());
    save(&run, &step_name(1), 1).unwrap();
    let staging = run.begin(&step_name(2), 2).unwrap();
    let mut names = fs::read_dir(run.path()).unwrap().map(|entry| entry.unwrap().path());
    let partial = names.find(|path| path.display().to_string().contains("partial")).unwrap();
    fs::remove_dir(&partial).unwrap();
    let manifest = manifest(2);
    let planned = pieces(&manifest, 0);
    let error = staging.write(0, Value::Null, &manifest, &planned, &mut |_, _, _| ()).unwrap_err();
    assert!(matches!(error, CheckpointError::Io { .. }), "{error}");
    assert!(error.to_string().contains("pieces-00000.safetensors"), "{error}");
    staging.discard();
    assert_eq!(step_of(&run), 1);
}
