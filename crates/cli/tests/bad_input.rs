//! What the user got wrong is one clear line and exit code 2, before any rank starts.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod common;

use common::{Place, TINY};

/// What `words` is refused with.
fn refusal(place: &Place, words: &str) -> String {
    let output = place.run(words);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{words}: {said}");
    assert!(output.stdout.is_empty(), "{words}: {}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(said.lines().count(), 1, "{words}: {said}");
    assert!(!place.path().join("runs").exists(), "{words}: a run folder was made");
    said
}

#[test]
fn a_refused_configuration_names_the_field_and_what_is_allowed() {
    let place = Place::new();
    let cases = [
        ("[model]\nhiden_size = 3", "did you mean `model.hidden_size`?"),
        ("[train]\nsteps = 'many'", "`train.steps = \"many\"`"),
        ("[train]\nsteps = 0", "`train.steps = 0`"),
        ("[optimizer]\nlr = -1.0", "allowed: a finite number above 0"),
        ("[model]\nheads = 5", "`model.hidden_size = 192`"),
        ("[model", "line 1"),
    ];
    for (text, expected) in cases {
        place.write("bad.toml", text);
        for command in ["train", "plan"] {
            let said = refusal(&place, &format!("{command} bad.toml"));
            assert!(said.starts_with("error: bad.toml: "), "{text}: {said}");
            assert!(said.contains(expected), "{text}: {said}");
        }
    }
}

#[test]
fn a_refused_flag_is_refused_as_its_field() {
    let place = Place::new();
    let cases = [
        ("--ranks 0", "`run.ranks = 0`"),
        ("--ranks 65", "allowed: 1 to 64"),
        ("--steps 0", "`train.steps = 0`"),
        ("--micro-batch 0", "train.micro_batch_size"),
        ("--accumulation 0", "train.gradient_accumulation_steps"),
        ("--bucket-bytes 0", "zero.bucket_bytes_max"),
        ("--threads-per-rank 0", "run.threads_per_rank"),
    ];
    for (flags, expected) in cases {
        let said = refusal(&place, &format!("train tiny.toml {flags}"));
        assert!(said.contains(expected), "{flags}: {said}");
        assert!(!said.contains("tiny.toml"), "it is not the file's fault: {said}");
    }
    let said = String::from_utf8(place.run("train --stage 4").stderr).unwrap();
    assert!(said.contains("allowed: 0, 1, 2, 3"), "{said}");
    assert_eq!(place.run("train --rank 2").status.code(), Some(2));
}

#[test]
fn missing_and_unfit_text_is_refused() {
    let place = Place::new();
    place.write("empty.txt", "");
    place.write("short.txt", "Too short.\n");
    std::fs::write(place.path().join("binary"), [0, 159, 146, 150]).unwrap();
    std::fs::create_dir(place.path().join("nothing")).unwrap();
    let cases = [
        ("train missing.toml", "cannot read `missing.toml`: no such file or directory"),
        ("train tiny.toml --data missing.txt", "cannot read `missing.txt`"),
        ("train tiny.toml --data empty.txt", "there is no text in `empty.txt`"),
        ("train tiny.toml --data nothing", "there is no text in `nothing`"),
        ("train tiny.toml --data binary", "no UTF-8 text"),
        ("train tiny.toml --data short.txt", "a text of 11 bytes is too short"),
        ("train tiny.toml --data short.txt", "give about 340 bytes"),
        ("train tiny.toml --data short.txt", "must have the 17 bytes of a sequence"),
        ("train tiny.toml --data /dev/zero", "it is not a regular file"),
        ("train /dev/zero", "it is not a regular file"),
        ("train binary", "it is no UTF-8 text"),
    ];
    for (words, expected) in cases {
        let said = refusal(&place, words);
        assert!(said.contains(expected), "{words}: {said}");
    }
    place.write("long.toml", &TINY.replace("context = 16", "context = 100000"));
    let said = refusal(&place, "train long.toml");
    assert!(said.contains("model.context = 100000"), "{said}");
}

#[test]
fn a_path_with_a_line_end_is_shown_on_one_line() {
    let place = Place::new();
    place.write("tiny.toml", &TINY.replace("text.txt", "a\\nb"));
    let said = refusal(&place, "train tiny.toml");
    assert!(said.contains("`a\\nb`"), "{said}");
}

#[test]
fn a_refusal_that_nobody_can_hear_is_one_still() {
    let place = Place::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = place.command("train --ranks 0").stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(2));
}

#[test]
fn without_cargos_sources_the_error_says_what_to_pass() {
    let place = Place::new();
    let mut command = place.command("train");
    let output = command.env("CARGO_HOME", place.path()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--data PATH") && said.lines().count() == 1, "{said}");
}

#[test]
fn a_folder_in_use_is_not_written_to() {
    let place = Place::new();
    std::fs::create_dir(place.path().join("used")).unwrap();
    place.write("used/notes.txt", "mine");
    let said = refusal(&place, "train tiny.toml --run-folder used");
    assert!(said.contains("not empty"), "{said}");
    assert_eq!(std::fs::read_dir(place.path().join("used")).unwrap().count(), 1);
}
