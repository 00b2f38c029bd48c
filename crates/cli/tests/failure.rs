//! A rank that dies ends the command at once, by name, and leaves nothing behind.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::Place;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// A run that would go on for hours, in its first steps; the processes of its ranks.
fn started(place: &Place) -> (Child, Vec<(usize, i32)>) {
    let temporary = place.path().join("tmp");
    fs::create_dir(&temporary).unwrap();
    let mut command = place.command("train tiny.toml --ranks 3 --steps 1000000");
    let child = in_its_first_steps(command.env("TMPDIR", &temporary));
    let ranks = ranks(child.id());
    assert_eq!(ranks.len(), 3);
    (child, ranks)
}

/// The run, which prints lines, once it has taken a step.
fn in_its_first_steps(command: &mut Command) -> Child {
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.by_ref().map_while(Result::ok).find(|line| line.starts_with("step "));
    assert!(first.is_some(), "{}", said(&mut child));
    // What the ranks go on to say must not block them.
    std::thread::spawn(move || lines.count());
    child
}

fn said(child: &mut Child) -> String {
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    said
}

/// Rank and process of every child of `parent` that is one by now.
fn ranks(parent: u32) -> Vec<(usize, i32)> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    let processes = children.split_whitespace().map(|pid| pid.parse().unwrap());
    let rank = |pid: i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let variable = environment.split(|byte| *byte == 0).find_map(|variable| {
            String::from_utf8_lossy(variable).strip_prefix("OXIZERO_RANK=").map(str::to_owned)
        });
        Some((variable?.parse().unwrap(), pid))
    };
    processes.filter_map(rank).collect()
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

/// Waits until the processes are gone; a zombie that nobody waits for yet counts as gone.
fn assert_gone(ranks: &[(usize, i32)]) {
    let deadline = Instant::now() + Duration::from_secs(2);
    let is_alive = |pid: i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    };
    while ranks.iter().any(|(_, pid)| is_alive(*pid)) {
        assert!(Instant::now() < deadline, "{ranks:?} are still there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn assert_empty(folder: &Path) {
    let left: Vec<_> = fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_killed_rank_ends_the_command_within_two_seconds_and_is_named() {
    for victim in [0, 1, 2] {
        let place = Place::new();
        let (mut child, ranks) = started(&place);
        kill(ranks.iter().find(|(rank, _)| *rank == victim).unwrap().1);
        let begin = Instant::now();
        let status = child.wait().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        assert_eq!(status.code(), Some(1));
        let expected = format!("error: rank {victim} was killed by signal 9\n");
        assert_eq!(said(&mut child), expected);
        assert_gone(&ranks);
        assert_empty(&place.path().join("tmp"));
    }
}

#[test]
fn ranks_do_not_outlive_the_command() {
    let place = Place::new();
    let (mut child, ranks) = started(&place);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_gone(&ranks);
    assert_empty(&place.path().join("tmp"));
}

/// What a run says when it is interrupted, before it ends by itself.
const HEARD: &str = "interrupted: the run ends with a checkpoint after this step; interrupt it \
                     again to end it at once\n";

/// At a terminal, Ctrl-C reaches all of the command's processes at once.
#[test]
fn a_run_that_is_interrupted_ends_with_a_checkpoint_from_which_it_goes_on() {
    let reaches = [kill_process, kill_process_group];
    for (flags, signal) in ["", "--in-process"].iter().flat_map(|f| reaches.map(|r| (f, r))) {
        let place = Place::new();
        let words = format!("train tiny.toml --ranks 3 --steps 1000000 {flags}");
        let mut child = in_its_first_steps(place.command(&words).process_group(0));
        let ranks = ranks(child.id());
        signal(Pid::from_child(&child), Signal::INT).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert_gone(&ranks);

        let folder = place.path().join("runs/0001");
        let metrics = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
        let steps = metrics.lines().filter(|line| line.contains(r#""event":"step""#)).count();
        let left = format!(
            "interrupted; the checkpoint step-{steps:06} is in `runs/0001`; go on with `oxizero \
             train --resume runs/0001`\n"
        );
        assert_eq!(said(&mut child), format!("{HEARD}{left}"));
        let names = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<_> = names.collect();
        names.sort();
        assert_eq!(names, ["checkpoints", "config.toml", "metrics.jsonl"]);
        let resumed = format!("train --resume runs/0001 --json --steps {}", steps + 2);
        let events = place.events(&resumed);
        let first = events.iter().find(|event| event["event"] == "step").unwrap();
        assert_eq!(first["step"], steps + 1);
    }
}

#[test]
fn a_second_interrupt_ends_a_run_at_once() {
    let place = Place::new();
    let (mut child, ranks) = started(&place);
    kill_process(Pid::from_raw(ranks[0].1).unwrap(), Signal::STOP).unwrap();
    let command = Pid::from_child(&child);
    kill_process(command, Signal::INT).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "a rank that stands still keeps the others");
    let begin = Instant::now();
    kill_process(command, Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert_eq!(said(&mut child), HEARD);
    assert_gone(&ranks);
}

#[test]
fn a_run_that_is_interrupted_before_its_first_step_leaves_nothing() {
    let place = Place::new();
    let mut command = place.command("train tiny.toml --ranks 2 --steps 1000000");
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let running = loop {
        let running = ranks(child.id());
        if running.len() == 2 {
            break running;
        }
    };
    kill_process(Pid::from_raw(running[0].1).unwrap(), Signal::STOP).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(said(&mut child), "interrupted; no step was taken\n");
    assert_gone(&running);
    assert!(!place.path().join("runs").exists());
}

#[test]
fn a_rank_that_cannot_write_is_the_cause_and_not_its_consequences() {
    let place = Place::new();
    for flags in ["--ranks 2", "--ranks 2 --in-process"] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut command = place.command(&format!("train tiny.toml --steps 1000000 {flags}"));
        let output = command.stdout(full).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: rank 0 failed: cannot write"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!place.path().join("runs").exists(), "a run that took no step left its folder");
    }
}

/// As in `oxizero train | head -1`: an end without words, and a shell's exit code for it.
#[test]
fn where_nobody_reads_the_output_the_command_ends_quietly() {
    let place = Place::new();
    let train = "train tiny.toml --ranks 2 --steps 1000000";
    for words in [train, &format!("{train} --in-process"), "plan tiny.toml"] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = place.command(words).stdout(writer).output().unwrap();
        assert_eq!(output.status.code(), Some(141), "{words}");
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "", "{words}");
    }
}

#[test]
fn a_rank_that_stops_before_it_has_its_job_ends_the_command_by_the_deadline() {
    let place = Place::new();
    place.write("text.txt", &"A text that no pipe holds.\n".repeat(1 << 17));
    place.write("tiny.toml", &format!("{}deadline_seconds = 1.0\n", common::TINY));
    for victim in [0, 1] {
        let mut command = place.command("train tiny.toml --ranks 2 --steps 1000000");
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let running = loop {
            let running = ranks(child.id());
            if running.iter().any(|(rank, _)| *rank == victim) {
                break running;
            }
        };
        let (_, pid) = running.iter().find(|(rank, _)| *rank == victim).unwrap();
        kill_process(Pid::from_raw(*pid).unwrap(), Signal::STOP).unwrap();
        let begin = Instant::now();
        assert_eq!(child.wait().unwrap().code(), Some(1));
        assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
        let said = said(&mut child);
        assert!(said.contains(&format!("rank {victim}")) && said.lines().count() == 1, "{said}");
        assert_gone(&running);
    }
}

#[test]
fn a_start_that_failed_is_not_in_the_way_of_the_next() {
    let place = Place::new();
    let slow = format!("{}deadline_seconds = 1e-9\n", common::TINY);
    place.write("slow.toml", &slow);
    for flags in ["", "--in-process"] {
        let output = place.run(&format!("train slow.toml --ranks 2 --run-folder a/b {flags}"));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(!said.contains("failed") && said.lines().count() == 1, "one is to blame: {said}");
        assert!(!place.path().join("a").exists());
    }
    place.events("train tiny.toml --ranks 2 --run-folder a/b --json");
}

#[test]
fn a_run_whose_weights_are_lost_says_so_and_saves_none() {
    let place = Place::new();
    let lost =
        format!("{}[optimizer]\nkind = 'sgd'\nlr = 1e38\nweight_decay = 1e38\n", common::TINY);
    place.write("lost.toml", &lost);
    for flags in ["--ranks 2", "--ranks 2 --in-process"] {
        let output =
            place.run(&format!("train lost.toml --run-folder lost{} {flags}", flags.len()));
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: training failed: the validation loss is"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        let report = String::from_utf8(output.stdout).unwrap();
        assert!(report.contains("problem         the validation loss is"), "{report}");
        let folder = place.path().join(format!("lost{}", flags.len()));
        assert!(folder.join("metrics.jsonl").exists());
        assert!(!folder.join("model.safetensors").exists());
    }
}
