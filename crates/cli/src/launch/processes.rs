//! Ranks as processes: this executable once more for each, watched until the last has ended.
//!
//! A rank's process learns its seat from the environment and its work from its standard input. It
//! dies with its parent, so that no rank outlives the command, however the command ends.

use std::env;
use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStderr, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use oxizero_comm::shm;
use oxizero_core::{Rank, WorldSize};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use super::failure::{Blame, Failure, first_cause};
use super::{POLL, Work, interrupted, threads_per_rank};
use crate::error::{CliError, say};

const RANK: &str = "OXIZERO_RANK";
const WORLD_SIZE: &str = "OXIZERO_WORLD_SIZE";
const RENDEZVOUS: &str = "OXIZERO_RENDEZVOUS";
const PARENT: &str = "OXIZERO_PARENT";

/// What a failing rank's last line starts with; the parent shows it once.
const ERROR_MARK: &str = "oxizero-rank-error: ";
/// How long the others have to see that a rank failed, before they are killed.
const GRACE: Duration = Duration::from_millis(700);

/// Starts the ranks, hands them the work, and waits for their end, or ends them.
pub(super) fn run(work: &Work, interrupt: &AtomicBool) -> Result<(), CliError> {
    // No other run has this name, and nobody can guess it.
    let random = RandomState::new().hash_one(std::process::id());
    let rendezvous = format!("oxizero-{}-{random:016x}", std::process::id());
    let mut ranks = Ranks { running: Vec::new() };
    for rank in 0..work.run().ranks {
        ranks.running.push(RankProcess::start(Rank(rank), work, &rendezvous)?);
    }
    thread::scope(|scope| {
        // A rank that does not take its work holds up nobody, and in the end it is killed.
        for rank in &mut ranks.running {
            let stdin = rank.child.stdin.take().expect("standard input is piped");
            scope.spawn(|| hand_over(work, stdin));
        }
        ranks.watch(interrupt)
    })
}

fn hand_over(work: &Work, stdin: ChildStdin) {
    let mut stdin = BufWriter::new(stdin);
    // A rank that has ended does not take its work; `watch` sees that it ended, and how.
    let _ended = work.send(&mut stdin).and_then(|()| stdin.flush());
}

/// Kills what still runs when it is dropped.
struct Ranks {
    running: Vec<RankProcess>,
}

struct RankProcess {
    rank: Rank,
    child: Child,
    /// Shows what the rank writes to standard error; returns its marked error.
    errors: Option<JoinHandle<Option<String>>>,
}

impl RankProcess {
    fn start(rank: Rank, work: &Work, rendezvous: &str) -> Result<Self, CliError> {
        let refused = |error| CliError::Start(format!("rank {rank}: {error}"));
        let stdout = if rank == Rank(0) { Stdio::inherit() } else { Stdio::null() };
        let mut child = Command::new(env::current_exe().map_err(refused)?)
            .env(RANK, rank.to_string())
            .env(WORLD_SIZE, work.run().ranks.to_string())
            .env(RENDEZVOUS, rendezvous)
            .env(PARENT, std::process::id().to_string())
            .env("RAYON_NUM_THREADS", threads_per_rank(work.run()).to_string())
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .map_err(refused)?;
        let stderr = child.stderr.take().expect("standard error is piped");
        let errors = Some(thread::spawn(move || forward(rank, stderr)));
        Ok(Self { rank, child, errors })
    }

    /// How the rank failed, given that it ended with `status`.
    fn failure(&mut self, status: ExitStatus) -> Option<Failure> {
        let said = self.errors.take().and_then(|errors| errors.join().ok().flatten());
        if status.success() {
            return None;
        }
        let blame = Blame::of_exit_code(status.code());
        let unsaid = |why| Failure { rank: self.rank, why, blame };
        Some(match (said, status.signal()) {
            (_, Some(signal)) => unsaid(format!("was killed by signal {signal}")),
            (Some(said), None) => Failure::new(self.rank, blame, &said),
            (None, None) => unsaid(format!("ended without a result ({status})")),
        })
    }
}

impl Ranks {
    /// Waits until all ranks have ended, or one has failed and the others had their time, or for an
    /// interrupt, which at a terminal has reached the ranks too: their ends are no failures then.
    fn watch(mut self, interrupt: &AtomicBool) -> Result<(), CliError> {
        let (mut failures, mut kill_at) = (Vec::new(), None);
        while !self.running.is_empty() && kill_at.is_none_or(|at| Instant::now() < at) {
            interrupted(interrupt)?;
            let mut still = Vec::new();
            for mut rank in std::mem::take(&mut self.running) {
                match rank.child.try_wait() {
                    Ok(None) => still.push(rank),
                    Ok(Some(status)) => failures.extend(rank.failure(status)),
                    Err(error) => return Err(CliError::Start(error.to_string())),
                }
            }
            self.running = still;
            if !failures.is_empty() && kill_at.is_none() {
                kill_at = Some(Instant::now() + GRACE);
            }
            thread::sleep(POLL);
        }
        interrupted(interrupt)?;
        first_cause(failures)
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.running {
            // Only a rank that has ended cannot be killed or waited for.
            let _ended = rank.child.kill().and_then(|()| rank.child.wait());
        }
    }
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
    // Refused only for a signal that does not exist.
    let _set = set_parent_process_death_signal(Some(Signal::KILL));
    if getppid() != seat.parent {
        // The parent died before the line above, or somebody set these variables by hand.
        say(&format!("error: this process is no rank: {PARENT} is not its parent; unset {RANK}"));
        return ExitCode::from(Blame::Other.exit_code());
    }
    let Err((why, blame)) = connect_and_run(seat) else { return ExitCode::SUCCESS };
    say(&format!("{ERROR_MARK}{}", why.replace('\n', " ")));
    ExitCode::from(blame.exit_code())
}

fn connect_and_run(seat: Seat) -> Result<(), (String, Blame)> {
    let work = Work::receive(&mut std::io::stdin().lock())
        .map_err(|error| (format!("the work did not arrive: {error}"), Blame::Other))?;
    let options = shm::Options {
        rank: seat.rank,
        world_size: seat.world_size,
        socket: seat.rendezvous,
        deadline: Duration::from_secs_f64(work.run().deadline_seconds),
        replicas: work.replicas(),
    };
    let comm =
        shm::connect(options).map_err(|error| (error.to_string(), Blame::of_comm(&error)))?;
    work.perform(comm).map_err(|error| (error.to_string(), error.blame()))
}
