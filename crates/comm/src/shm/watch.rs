//! Notices that another process has ended, and tells everybody.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use oxizero_core::Rank;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use super::memory::{Mapping, system};
use super::rendezvous::Peer;
use crate::CommError;
use crate::transport::Failure;

/// A thread that waits for the end of the other processes, until it is dropped.
pub(super) struct Watcher {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// Something that becomes readable when a rank's process has ended.
struct Sign {
    rank: Rank,
    file: OwnedFd,
}

impl Watcher {
    pub(super) fn start(
        mapping: Arc<Mapping>,
        rank: Rank,
        peers: Vec<Peer>,
    ) -> Result<Self, CommError> {
        let stop = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|errno| system("watch the other ranks", errno))?;
        let stop = Arc::new(stop);
        let mut signs = signs(&mapping, peers);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("oxizero-watch".to_owned())
            .spawn(move || {
                // Unwatched, the others' ends would go unnoticed until the deadline. The sockets
                // stay open until that is told: their end would be taken for this process's.
                if let Err(errno) = watch(&mapping, &mut signs, stopped.as_fd()) {
                    let why = format!("it cannot watch the other ranks any more: {errno}");
                    mapping.control().fail(Failure::Aborted(rank, why));
                }
            })
            .map_err(|error| CommError::System {
                operation: "watch the other ranks",
                why: error.to_string(),
            })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // An eventfd takes the eight bytes of a number, and refuses only when it is full.
        let _ = rustix::io::write(&*self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A pidfd of every peer, and the sockets to those peers to which there is one. Where there is no
/// pidfd, rank 0 notices by the socket, and tells the others.
fn signs(mapping: &Mapping, peers: Vec<Peer>) -> Vec<Sign> {
    let mut signs = Vec::new();
    for Peer { rank, pid, socket } in peers {
        signs.extend(socket.map(|file| Sign { rank, file }));
        match Pid::from_raw(pid).map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty())) {
            Some(Ok(file)) => signs.push(Sign { rank, file }),
            Some(Err(Errno::SRCH)) => ended(mapping, rank),
            _ => {}
        }
    }
    signs
}

/// Returns when `stop` is readable.
fn watch(mapping: &Mapping, signs: &mut Vec<Sign>, stop: BorrowedFd<'_>) -> rustix::io::Result<()> {
    loop {
        let flags = PollFlags::IN | PollFlags::RDHUP;
        let mut polled: Vec<_> = signs.iter().map(|sign| PollFd::new(&sign.file, flags)).collect();
        polled.push(PollFd::new(&stop, PollFlags::IN));
        match rustix::event::poll(&mut polled, None) {
            Err(Errno::INTR) => continue,
            result => result?,
        };
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        if ready[signs.len()] {
            return Ok(());
        }
        let mut ready = ready.into_iter();
        signs.retain(|sign| {
            let has_ended = ready.next().unwrap_or(false);
            if has_ended {
                ended(mapping, sign.rank);
            }
            !has_ended
        });
    }
}

/// A rank that has left the world may end; whoever still waits for it finds that it has left.
fn ended(mapping: &Mapping, rank: Rank) {
    if !mapping.control().has_departed(rank) {
        mapping.control().fail(Failure::Dead(rank));
    }
}
