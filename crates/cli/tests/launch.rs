//! `oxizero launch` starts any program as ranks, and ends them together.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A folder in which ranks leave files.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oxizero"));
        command.arg("launch").args(words).current_dir(self.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Two ranks, or as `options` say, of a shell script.
    fn shell(&self, options: &[&str], script: &str) -> Command {
        let two: &[&str] = if options.contains(&"-n") { &[] } else { &["-n", "2"] };
        self.command(&[two, options, &["--", "/bin/sh", "-c", script]].concat())
    }

    /// What a file holds, once it has a whole line.
    fn line(&self, name: &str) -> String {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let text = fs::read_to_string(self.path().join(name)).unwrap_or_default();
            if text.ends_with('\n') {
                return text.trim_end().to_owned();
            }
            assert!(Instant::now() < deadline, "there is no {name}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts ranks that sleep, each with a child that sleeps too and hears no polite signal, and
    /// says which processes they are.
    fn sleepers(&self, options: &[&str]) -> (Child, Vec<i32>) {
        let child = self.shell(options, SLEEPERS).spawn().unwrap();
        let pids = ["a0", "a1", "b0", "b1"].map(|name| self.line(name).parse().unwrap());
        (child, pids.to_vec())
    }
}

const SLEEPERS: &str = "(trap '' INT TERM; exec sleep 100) & echo $! > b$RANK.new
                        mv b$RANK.new b$RANK; echo $$ > a$RANK; wait";

fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

/// Waits until the processes are gone; a zombie that nobody waits for yet counts as gone.
fn assert_gone(pids: &[i32]) {
    let deadline = Instant::now() + Duration::from_secs(2);
    let is_alive = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        !stat.is_empty() && !stat.contains(") Z ")
    };
    while pids.iter().any(is_alive) {
        assert!(Instant::now() < deadline, "{pids:?} are still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn ranks_find_their_place_in_the_environment() {
    let place = Place::new();
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT \
                  $OMP_NUM_THREADS $(cat)";
    let run = |threads: Option<&str>| {
        let mut command = place.shell(&["-n", "3"], script);
        match threads {
            Some(threads) => command.env("OMP_NUM_THREADS", threads),
            None => command.env_remove("OMP_NUM_THREADS"),
        };
        let output = command.env("RANK", "7").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let (stdout, stderr) = said(&output);
        assert_eq!(stderr, "");
        let mut lines: Vec<_> = stdout.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let cpus = std::thread::available_parallelism().unwrap().get();
    for (given, threads) in [(None, (cpus / 3).max(1).to_string()), (Some("5"), "5".to_owned())] {
        let lines = run(given);
        let port: u16 = lines[0].split(' ').nth(5).unwrap().parse().unwrap();
        let expected = |rank| format!("{rank} {rank} 3 3 127.0.0.1 {port} {threads}");
        assert_eq!(lines, [0, 1, 2].map(expected));
    }
}

#[test]
fn a_script_of_python_and_a_module_run_with_the_interpreter_that_is_named() {
    let place = Place::new();
    fs::write(place.path().join("train.py"), "").unwrap();
    fs::write(place.path().join("python"), "#!/bin/sh\necho \"$@\"\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(place.path().join("python"), executable).unwrap();
    let run = |words: &[&str]| {
        let python = place.path().join("python");
        let output = place.command(words).env("PYTHON", python).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        said(&output).0
    };
    assert_eq!(run(&["-n", "1", "train.py", "--lr", "1"]), "-u train.py --lr 1\n");
    assert_eq!(run(&["-n", "1", "-m", "a.b", "-n", "9"]), "-u -m a.b -n 9\n");
}

#[test]
fn a_rank_that_fails_gives_its_exit_code_and_its_last_words() {
    let place = Place::new();
    let script = "echo $$ > a$RANK; [ $RANK = 1 ] || exec sleep 100
                  echo before >&2; printf 'what\\nwhy' >&2; exit 9";
    let begin = Instant::now();
    let output = place.shell(&[], script).output().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    assert_eq!(output.status.code(), Some(9));
    let expected = "before\nwhat\nwhyerror: rank 1 failed first: it ended with exit code 9; its \
                    last lines on standard error:\n  | before\n  | what\n  | why\n";
    assert_eq!(said(&output).1, expected);
    assert_gone(&[place.line("a0").parse().unwrap()]);
}

#[test]
fn a_rank_that_is_killed_is_named() {
    let place = Place::new();
    let script = "[ $RANK = 0 ] || exec sleep 100; kill -9 $$";
    let output = place.shell(&["-n", "3"], script).output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 9));
    assert_eq!(said(&output).1, "error: rank 0 failed first: it was killed by signal 9\n");
}

/// A Python process takes long to end once it has failed, and its peers fail of that meanwhile.
#[test]
fn the_first_to_say_that_it_fails_is_named_and_not_the_first_to_end() {
    let place = Place::new();
    let script = "[ $RANK = 1 ] || { while [ ! -e said ]; do sleep 0.01; done; sleep 0.1; }
                  echo 'Traceback (most recent call last):' >&2; : > said
                  echo \"rank $RANK\" >&2; [ $RANK = 0 ] || sleep 0.4; exit $((RANK + 4))";
    let output = place.shell(&[], script).output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    let (_, stderr) = said(&output);
    assert!(stderr.contains("error: rank 1 failed first: it ended with exit code 5"), "{stderr}");
    assert!(stderr.ends_with("  | Traceback (most recent call last):\n  | rank 1\n"), "{stderr}");
}

#[test]
fn all_ranks_may_end_when_they_like() {
    let place = Place::new();
    let output = place.shell(&[], "[ $RANK = 0 ] || sleep 1; echo $RANK").output().unwrap();
    assert!(output.status.success());
    assert_eq!(said(&output), ("0\n1\n".into(), String::new()));
}

#[test]
fn lines_have_their_rank_in_front_if_asked_for() {
    let place = Place::new();
    let script = "echo out; printf 'no end'; echo err >&2";
    let output = place.shell(&["--prefix"], script).output().unwrap();
    assert!(output.status.success());
    let (stdout, stderr) = said(&output);
    let lines: BTreeSet<_> = stdout.lines().collect();
    assert_eq!(lines, ["[0] out", "[0] no end", "[1] out", "[1] no end"].into());
    assert_eq!(stderr.lines().collect::<BTreeSet<_>>(), ["[0] err", "[1] err"].into());
}

/// As if each rank wrote there itself.
#[test]
fn a_rank_whose_output_nobody_reads_learns_it() {
    let place = Place::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let script = "while echo line; do :; done";
    let output = place.shell(&[], script).stdout(writer).output().unwrap();
    assert!([1, 2, 128 + 13].contains(&output.status.code().unwrap()), "{output:?}");
}

#[test]
fn a_signal_ends_the_ranks_and_what_they_started() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let place = Place::new();
        let (mut child, pids) = place.sleepers(&[]);
        let begin = Instant::now();
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(code));
        assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
        assert_gone(&pids);
    }
}

#[test]
fn no_process_outlives_a_launcher_that_is_killed() {
    let place = Place::new();
    let (mut child, pids) = place.sleepers(&[]);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_gone(&pids);
}

#[test]
fn what_a_rank_leaves_behind_ends_with_it() {
    for end in ["exit 0", "exit 1", "kill -9 $$"] {
        let place = Place::new();
        let script = format!("sleep 100 & echo $! > b$RANK; {end}");
        place.shell(&[], &script).output().unwrap();
        assert_gone(&["b0", "b1"].map(|name| place.line(name).parse().unwrap()));
    }
}

/// A rank may save what it has; one that does not end is killed when its time is over.
#[test]
fn a_rank_that_is_told_to_end_has_its_grace() {
    let place = Place::new();
    let script = "trap 'sleep 0.3; echo yes > saved$RANK; [ $RANK = 0 ] || exit 0' INT
                  echo > up$RANK; while :; do sleep 0.01; done";
    let mut child = place.shell(&["--grace", "1.5"], script).spawn().unwrap();
    let _up = ["up0", "up1"].map(|name| place.line(name));
    let begin = Instant::now();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(begin.elapsed() > Duration::from_millis(1400), "{:?}", begin.elapsed());
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    assert_eq!(["saved0", "saved1"].map(|name| place.line(name)), ["yes", "yes"]);
}

#[test]
fn a_second_interrupt_ends_all_at_once() {
    let place = Place::new();
    let script = "trap '' INT; echo $$ > a$RANK; while :; do sleep 0.01; done";
    let mut child = place.shell(&["--grace", "60"], script).spawn().unwrap();
    let pids = ["a0", "a1"].map(|name| place.line(name).parse().unwrap());
    for _ in 0..2 {
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_gone(&pids);
}

#[test]
fn what_cannot_be_started_is_said_once() {
    let place = Place::new();
    for (words, code, said_first) in [
        (&["-n", "2", "--", "/absent"][..], 127, "error: cannot start `/absent`: "),
        (&["-n", "2", "--", "/etc/passwd"], 126, "error: cannot start `/etc/passwd`: "),
        (&["-n", "2", "absent.py"], 2, "error: there is no file `absent.py`\nusage: "),
        (&["-m", "train"], 2, "error: the number of ranks is missing"),
        (&[], 2, "error: there is nothing to start"),
    ] {
        let output = place.command(words).output().unwrap();
        let (stdout, stderr) = said(&output);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {stderr}");
        assert!(stdout.is_empty() && stderr.starts_with(said_first), "{words:?}: {stderr}");
    }
    let output = place.command(&["-n", "2", "--help"]).output().unwrap();
    assert!(output.status.success());
    assert!(said(&output).0.contains("Usage: oxizero launch -n <N>"));
}
