//! Processes that die with the thread that starts them: the only unsafe code of the crate.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// Lets the command's process be killed when the calling thread ends, however that ends.
pub(crate) fn tether(command: &mut Command) -> &mut Command {
    let parent = getpid();
    // SAFETY: between fork and exec only calls that are safe after a fork of a process with threads
    // may be made: `die_with` makes two system calls, allocates nothing and takes no lock.
    unsafe { command.pre_exec(move || die_with(parent)) }
}

fn die_with(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // A parent that ended before the line above is not heard of any more.
    if getppid() == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
}
