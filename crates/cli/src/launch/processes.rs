//! Ranks as processes: this executable once more for each, watched until the last has ended.
//!
//! A rank's process learns its seat from the environment and its work from its standard input. It
//! dies with its parent, so that no rank outlives the command, however the command ends.

use std::env;
use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStderr, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use oxizero_comm::shm;
use oxizero_core::{Rank, WorldSize};
use oxizero_launch::{Ended, Ranks};
use rustix::process::{Pid, getppid};
use signal_hook::consts::SIGINT;
use signal_hook::flag::register;

use super::failure::{Blame, Failure, first_cause};
use super::{Answer, Work, threads_per_rank};
use crate::error::{CliError, say};

const RANK: &str = "OXIZERO_RANK";
const WORLD_SIZE: &str = "OXIZERO_WORLD_SIZE";
const RENDEZVOUS: &str = "OXIZERO_RENDEZVOUS";
const PARENT: &str = "OXIZERO_PARENT";

/// What a failing rank's last line starts with; the parent shows it once.
const ERROR_MARK: &str = "oxizero-rank-error: ";

/// Starts the ranks, hands them the work, and waits for their end, or ends them.
pub(super) fn run(work: &Work, mut answer: Answer<impl FnMut() -> bool>) -> Result<(), CliError> {
    // No other run has this name, and nobody can guess it.
    let random = RandomState::new().hash_one(std::process::id());
    let rendezvous = format!("oxizero-{}-{random:016x}", std::process::id());
    thread::scope(|scope| {
        // A rank has nothing to do once the run is over.
        let (mut ranks, mut errors) = (Ranks::new(Duration::ZERO), Vec::new());
        for rank in (0..work.run().ranks).map(Rank) {
            let refused = |error| CliError::Start(format!("rank {rank}: {error}"));
            let mut command = command(rank, work, &rendezvous).map_err(refused)?;
            let child = ranks.start(rank.0, &mut command).map_err(refused)?;
            let stderr = child.stderr.take().expect("standard error is piped");
            errors.push(Some(thread::spawn(move || forward(rank, stderr))));
            // A rank that does not take its work holds up nobody, and in the end it is killed.
            let stdin = child.stdin.take().expect("standard input is piped");
            scope.spawn(|| hand_over(work, stdin));
        }
        let ended = ranks.wait(|| answer.order());
        let ended = ended.map_err(|error| CliError::Start(error.to_string()))?;
        answer.check()?;
        first_cause(ended.iter().filter_map(|ended| {
            let said = errors[ended.rank].take().and_then(|errors| errors.join().ok().flatten());
            failure(ended, said)
        }))
    })
}

fn hand_over(work: &Work, stdin: ChildStdin) {
    let mut stdin = BufWriter::new(stdin);
    // A rank that has ended does not take its work; `Ranks::wait` sees that it ended, and how.
    let _ended = work.send(&mut stdin).and_then(|()| stdin.flush());
}

/// The command of a rank.
fn command(rank: Rank, work: &Work, rendezvous: &str) -> io::Result<Command> {
    let stdout = if rank == Rank(0) { Stdio::inherit() } else { Stdio::null() };
    let mut command = Command::new(env::current_exe()?);
    command
        .env(RANK, rank.to_string())
        .env(WORLD_SIZE, work.run().ranks.to_string())
        .env(RENDEZVOUS, rendezvous)
        .env(PARENT, std::process::id().to_string())
        .env("RAYON_NUM_THREADS", threads_per_rank(work.run()).to_string())
        .stdin(Stdio::piped())
        .stdout(stdout)
        .stderr(Stdio::piped());
    Ok(command)
}

/// How a rank failed, given how it ended and the marked error that it wrote.
fn failure(ended: &Ended, said: Option<String>) -> Option<Failure> {
    if ended.status.success() {
        return None;
    }
    let (rank, blame) = (Rank(ended.rank), Blame::of_exit_code(ended.status.code()));
    let unsaid = |why| Failure { rank, why, blame };
    Some(match (said, ended.status.signal()) {
        (_, Some(signal)) => unsaid(format!("was killed by signal {signal}")),
        (Some(said), None) => Failure::new(rank, blame, &said),
        (None, None) => unsaid(format!("ended without a result ({})", ended.status)),
    })
}

/// Passes on what a rank writes, line by line; keeps the line that is marked.
fn forward(rank: Rank, stderr: ChildStderr) -> Option<String> {
    let mut marked = None;
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        match line.strip_prefix(ERROR_MARK) {
            Some(error) => marked = Some(error.to_owned()),
            None => say(&format!("rank {rank}: {line}")),
        }
    }
    marked
}

/// A rank's place, as its process finds it in the environment.
pub(crate) struct Seat {
    rank: Rank,
    world_size: WorldSize,
    rendezvous: OsString,
    parent: Option<Pid>,
}

impl Seat {
    /// `None` if this process is not a rank.
    pub(crate) fn from_environment() -> Option<Self> {
        let number = |name| env::var(name).ok()?.parse::<usize>().ok();
        Some(Self {
            rank: Rank(number(RANK)?),
            world_size: WorldSize::new(number(WORLD_SIZE)?)?,
            rendezvous: env::var_os(RENDEZVOUS)?,
            parent: number(PARENT).and_then(|pid| Pid::from_raw(pid.try_into().ok()?)),
        })
    }
}

/// A rank's whole process.
pub(crate) fn run_seat(seat: Seat) -> ExitCode {
    if getppid() != seat.parent {
        // Somebody set these variables by hand, or the parent has just ended, and this process too.
        say(&format!("error: this process is no rank: {PARENT} is not its parent; unset {RANK}"));
        return ExitCode::from(Blame::Other.exit_code());
    }
    let Err((why, blame)) = connect_and_run(seat) else { return ExitCode::SUCCESS };
    say(&format!("{ERROR_MARK}{}", why.replace('\n', " ")));
    ExitCode::from(blame.exit_code())
}

fn connect_and_run(seat: Seat) -> Result<(), (String, Blame)> {
    let work = Work::receive(&mut io::stdin().lock())
        .map_err(|error| (format!("the work did not arrive: {error}"), Blame::Other))?;
    let asked = Arc::<AtomicBool>::default();
    if work.hears() {
        let heard = register(SIGINT, Arc::clone(&asked));
        heard.map_err(|error| (format!("no signals are heard: {error}"), Blame::Own))?;
    }
    let options = shm::Options {
        deadline: Duration::from_secs_f64(work.run().deadline_seconds),
        replicas: work.replicas(),
        ..shm::Options::new(seat.rank, seat.world_size, seat.rendezvous)
    };
    let comm =
        shm::connect(options).map_err(|error| (error.to_string(), Blame::of_comm(&error)))?;
    work.perform(comm, &asked).map_err(|error| (error.to_string(), error.blame()))
}
