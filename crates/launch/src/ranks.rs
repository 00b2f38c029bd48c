//! Ranks as processes that end together.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};

use crate::guard::Guard;
use crate::tether::tether;

/// Between looks at whether ranks have ended.
const POLL: Duration = Duration::from_millis(10);
/// How long the others have to see for themselves that a rank failed, and to say so.
const NOTICE: Duration = Duration::from_millis(700);

/// Processes of ranks, killed when this value is dropped, and when the thread that started them
/// ends, however it ends.
pub struct Ranks {
    running: Vec<Running>,
    grace: Duration,
    guard: Option<Guard>,
}

struct Running {
    rank: usize,
    child: Child,
}

/// What is told to all ranks that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// They get a signal, and end when they see fit.
    Hear(Signal),
    /// They get a signal, and are killed when their grace is over.
    End(Signal),
}

/// A rank that ended before it was told to.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// Which one.
    pub rank: usize,
    /// How.
    pub status: ExitStatus,
    /// When that was seen.
    pub at: Instant,
}

impl Ranks {
    /// None yet. `grace` is how long a rank has to end itself once it is told to.
    pub fn new(grace: Duration) -> Self {
        Self { running: Vec::new(), grace, guard: None }
    }

    /// The same for ranks that start processes themselves. Each rank has a process group of its own
    /// with them, which gets every signal that the rank gets, and is killed when the rank ends, or
    /// this process. What a rank puts into another group is its own business.
    ///
    /// # Errors
    ///
    /// If `/bin/sh` cannot be started, which guards them.
    pub fn guarded(grace: Duration) -> io::Result<Self> {
        let mut ranks = Self::new(grace);
        ranks.guard = Some(Guard::start()?);
        Ok(ranks)
    }

    /// Starts a rank, which dies with the calling thread.
    ///
    /// # Errors
    ///
    /// If the command cannot be started.
    pub fn start(&mut self, rank: usize, command: &mut Command) -> io::Result<&mut Child> {
        if self.guard.is_some() {
            command.process_group(0);
        }
        let child = tether(command).spawn()?;
        let group = Pid::from_child(&child);
        // The first to do: it is killed even if what follows fails.
        self.running.push(Running { rank, child });
        if let Some(guard) = &mut self.guard {
            guard.runs(group)?;
        }
        Ok(&mut self.running.last_mut().expect("it was pushed above").child)
    }

    /// Waits until all have ended. Once one has failed, the others are told to end, and are killed
    /// when their grace is over; `order`, which is asked again and again, may tell them so before.
    /// Returns those that ended until then, in the order in which that was seen.
    ///
    /// # Errors
    ///
    /// If the system refuses to tell of the processes.
    pub fn wait(&mut self, mut order: impl FnMut() -> Option<Order>) -> io::Result<Vec<Ended>> {
        let (mut ended, mut tell_at) = (Vec::new(), None);
        while !self.running.is_empty() {
            let now = self.reap()?;
            if tell_at.is_none() && now.iter().any(|ended| !ended.status.success()) {
                tell_at = Some(Instant::now() + NOTICE);
            }
            ended.extend(now);
            let late = tell_at.is_some_and(|at| Instant::now() >= at);
            match order().or(late.then_some(Order::End(Signal::TERM))) {
                Some(Order::Hear(signal)) => self.signal(signal),
                Some(Order::End(signal)) => {
                    self.end(signal)?;
                    break;
                }
                None => {}
            }
            thread::sleep(POLL);
        }
        Ok(ended)
    }

    /// Tells all to end, and kills those that do not.
    fn end(&mut self, signal: Signal) -> io::Result<()> {
        self.signal(signal);
        let kill_at = Instant::now() + self.grace;
        while !self.running.is_empty() && Instant::now() < kill_at {
            self.reap()?;
            thread::sleep(POLL);
        }
        self.kill();
        Ok(())
    }

    /// Takes out the ranks that have ended, and kills what they left of their groups.
    fn reap(&mut self) -> io::Result<Vec<Ended>> {
        let (mut ended, mut next) = (Vec::new(), 0);
        while next < self.running.len() {
            if has_ended(&self.running[next].child)? {
                let mut running = self.running.remove(next);
                let status = self.bury(&mut running)?;
                ended.push(Ended { rank: running.rank, status, at: Instant::now() });
            } else {
                next += 1;
            }
        }
        Ok(ended)
    }

    /// The group has its number until its leader is waited for, and nobody else has.
    fn bury(&mut self, running: &mut Running) -> io::Result<ExitStatus> {
        if let Some(guard) = &mut self.guard {
            let group = Pid::from_child(&running.child);
            let _none_left = kill_process_group(group, Signal::KILL);
            // A guard that is gone guards nothing.
            let _unheard = guard.ended(group);
        }
        running.child.wait()
    }

    fn signal(&self, signal: Signal) {
        let send = if self.guard.is_some() { kill_process_group } else { kill_process };
        for running in &self.running {
            let _gone = send(Pid::from_child(&running.child), signal);
        }
    }

    fn kill(&mut self) {
        self.signal(Signal::KILL);
        for mut running in std::mem::take(&mut self.running) {
            let _status = self.bury(&mut running);
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether the process has ended; it stays to be waited for.
fn has_ended(child: &Child) -> io::Result<bool> {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(Pid::from_child(child)), look)?.is_some())
}
