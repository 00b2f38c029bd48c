//! `oxizero launch`: ranks of any program, from its words to its exit code.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown, register_usize};

use crate::arguments::{HELP, Launch, Program, parse};
use crate::output::{Forwarded, Tail, forward};
use crate::ranks::{Ended, Order, Ranks};

/// Lines of a failed rank that are shown once more.
const LINES_SHOWN: usize = 15;
/// The exit code for words that were refused.
const REFUSED: u8 = 2;

const COMMAND_HELP: &str = "\
Starts training scripts as several ranks of this machine, and takes over DeepSpeed's checkpoints

Usage: oxizero launch -n <N> <SCRIPT.py> [ARGUMENTS]
       oxizero convert --from deepspeed <FOLDER> <OUT>

Commands:
  launch         Start a script as several ranks; `oxizero launch --help` says more
  convert        Make a checkpoint of one of DeepSpeed's; `oxizero convert --help` says more

Options:
  -h, --help     Print help
  -V, --version  Print version
";

/// The command `oxizero` of a package that only launches: `words` are those after its name.
/// Returns the exit code; see [`launch`].
pub fn command(words: Vec<OsString>, python: &OsStr) -> u8 {
    let mut words = words.into_iter();
    let first = words.next().unwrap_or_default();
    match first.to_str() {
        Some("launch") => launch(words, python),
        Some("-V" | "--version") => print(concat!("oxizero ", env!("CARGO_PKG_VERSION"), "\n")),
        Some("-h" | "--help") => print(COMMAND_HELP),
        _ => {
            let shown = first.display();
            say(&format!("error: `{shown}` is no command of this package\n\n{COMMAND_HELP}"));
            REFUSED
        }
    }
}

/// Starts the ranks that `words` ask for, those after `launch`, with `python` for Python's scripts
/// and modules, and returns their exit code.
///
/// 0 if all ranks succeeded; the exit code of the first that failed, or 128 and its signal; 2 if
/// the words were refused; 126 and 127 as of a shell for what cannot be started; 130 and 143 after
/// SIGINT and SIGTERM, whose handlers stay. The ranks die with the calling thread.
pub fn launch(words: impl IntoIterator<Item = OsString>, python: &OsStr) -> u8 {
    match parse(words) {
        Ok(None) => print(HELP),
        Ok(Some(launch)) => run(&launch, python).unwrap_or_else(|failure| {
            say(&format!("error: {}", failure.why));
            failure.code
        }),
        Err(why) => {
            say(&format!("error: {why}"));
            REFUSED
        }
    }
}

/// What kept the ranks from running.
struct Failure {
    why: String,
    code: u8,
}

impl Failure {
    fn new(error: &io::Error) -> Self {
        Self { why: format!("cannot start the ranks: {error}"), code: 1 }
    }

    fn of_program(program: &OsStr, error: &io::Error) -> Self {
        let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
        Self { why: format!("cannot start `{}`: {error}", program.display()), code }
    }
}

fn run(launch: &Launch, python: &OsStr) -> Result<u8, Failure> {
    let stop = stop().map_err(|error| Failure::new(&error))?;
    let port = free_port().map_err(|error| Failure::new(&error))?;
    let mut ranks = Ranks::guarded(launch.grace).map_err(|error| Failure::new(&error))?;
    let mut outputs = Vec::new();
    for rank in 0..launch.ranks {
        let mut command = command_of(launch, python);
        command.envs(environment(launch, rank, port)).stdin(Stdio::null()).stderr(Stdio::piped());
        if by_lines(launch) {
            command.stdout(Stdio::piped());
        }
        let child = ranks
            .start(rank, &mut command)
            .map_err(|error| Failure::of_program(command.get_program(), &error))?;
        let prefix = launch.prefix.then(|| format!("[{rank}] "));
        let whole_lines = Some(prefix.clone().unwrap_or_default());
        let stdout = child.stdout.take().map(|from| forward(from, io::stdout(), whole_lines));
        let stderr = child.stderr.take().expect("standard error is piped");
        outputs.push((stdout, forward(stderr, io::stderr(), prefix)));
    }
    let asked = || Signal::from_named_raw(stop.load(Relaxed).try_into().ok()?);
    let ended = ranks.wait(|| asked().map(Order::End)).map_err(|error| Failure::new(&error))?;
    drop(ranks);
    let tails = outputs.into_iter().map(last_words).collect();
    if let Some(signal) = asked() {
        return Ok(128 + u8::try_from(signal.as_raw()).expect("signals are few"));
    }
    Ok(first_failure(ended, tails).map_or(0, |(ended, tail)| report(launch, &ended, &tail)))
}

/// Whether standard output is passed on, in whole lines. A terminal is the ranks' own: what they
/// write to it has ends of lines, and they may ask it for its width.
fn by_lines(launch: &Launch) -> bool {
    launch.prefix || !io::stdout().is_terminal()
}

/// Is set to the signal that asks the command to end; a second SIGINT ends it, and the ranks with
/// it, at once.
fn stop() -> io::Result<Arc<AtomicUsize>> {
    let (stop, again) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
    register_conditional_shutdown(SIGINT, 128 + SIGINT, Arc::clone(&again))?;
    register(SIGINT, again)?;
    for signal in [SIGINT, SIGTERM] {
        register_usize(signal, Arc::clone(&stop), signal.unsigned_abs() as usize)?;
    }
    Ok(stop)
}

fn command_of(launch: &Launch, python: &OsStr) -> Command {
    let mut command = match &launch.program {
        Program::Script(_) | Program::Module(_) => Command::new(python),
        Program::Command(program) => Command::new(program),
    };
    if !matches!(launch.program, Program::Command(_)) && by_lines(launch) {
        // Unbuffered, so that what a rank has written comes at once, and is not lost with it.
        command.arg("-u");
    }
    match &launch.program {
        Program::Script(path) => command.arg(path),
        Program::Module(name) => command.arg("-m").arg(name),
        Program::Command(_) => &mut command,
    };
    command.args(&launch.arguments);
    command
}

fn environment(launch: &Launch, rank: usize, port: u16) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", rank.to_string()),
        ("WORLD_SIZE", launch.ranks.to_string()),
        ("LOCAL_WORLD_SIZE", launch.ranks.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", port.to_string()),
    ];
    if env::var_os("OMP_NUM_THREADS").is_none() {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        variables.push(("OMP_NUM_THREADS", (cpus / launch.ranks).max(1).to_string()));
    }
    variables
}

/// A port that nobody listens on. Nothing keeps it free; who takes it before rank 0 does makes the
/// script fail where it listens, with the port's number.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// What the rank said last on its standard error, after all that it said was passed on.
fn last_words((stdout, stderr): (Option<Forwarded>, Forwarded)) -> Tail {
    drop(stdout.map(Forwarded::tail));
    stderr.tail()
}

/// The rank that failed before the others.
fn first_failure(ended: Vec<Ended>, tails: Vec<Tail>) -> Option<(Ended, Tail)> {
    let mut tails: Vec<_> = tails.into_iter().map(Some).collect();
    let failed = ended.into_iter().filter(|ended| !ended.status.success());
    let with_tails = failed.filter_map(|ended| Some((ended, tails[ended.rank].take()?)));
    with_tails.min_by_key(|(ended, tail)| failed_at(ended, tail))
}

fn failed_at(ended: &Ended, tail: &Tail) -> Instant {
    let said = tail.traceback_at().filter(|_| ended.status.signal().is_none());
    said.unwrap_or(ended.at)
}

/// Says how the rank failed; returns the exit code.
fn report(launch: &Launch, ended: &Ended, tail: &Tail) -> u8 {
    let (how, code) = fate(ended.status);
    let first = if launch.ranks > 1 { " first" } else { "" };
    let lines = tail.last(LINES_SHOWN);
    let lead = if lines.is_empty() { "" } else { "; its last lines on standard error:" };
    let lines: String = lines.iter().map(|line| format!("\n  | {line}")).collect();
    say(&format!("error: rank {} failed{first}: {how}{lead}{lines}", ended.rank));
    code
}

/// In words, and as the exit code that a shell would give.
fn fate(status: ExitStatus) -> (String, u8) {
    let number = |number: i32| u8::try_from(number).unwrap_or(1);
    match (status.code(), status.signal()) {
        (Some(code), _) => (format!("it ended with exit code {code}"), number(code)),
        (None, Some(signal)) => (format!("it was killed by signal {signal}"), number(128 + signal)),
        (None, None) => (status.to_string(), 1),
    }
}

fn print(text: &str) -> u8 {
    u8::from(io::stdout().write_all(text.as_bytes()).is_err())
}

/// Writes to standard error; where nobody listens any more, nothing is lost.
fn say(text: &str) {
    let _unheard = writeln!(io::stderr(), "{text}");
}
