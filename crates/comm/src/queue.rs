//! The order in which a rank's operations run where they run on a thread of their own.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use crate::waits::LOOK_EVERY;
use crate::{CommError, Communicator, Handle};

/// One group's way to a rank's communication thread. All groups of the rank have the same thread,
/// so that operations run in the order in which they were issued, whichever group they are of.
pub struct Queue {
    inner: Arc<dyn Communicator>,
    thread: Arc<Thread>,
}

/// Runs jobs one after the other. Dropping it waits for those that were issued, on which other
/// ranks count, and ends the thread.
struct Thread {
    jobs: Option<Sender<Job>>,
    running: Option<JoinHandle<()>>,
    interrupted: fn() -> bool,
}

type Job = Box<dyn FnOnce() + Send>;

/// An operation that runs, or is about to.
pub(crate) struct Pending<T> {
    result: Receiver<Result<T, CommError>>,
    inner: Arc<dyn Communicator>,
    interrupted: fn() -> bool,
}

thread_local! {
    /// Whether this is a rank's communication thread.
    static IS_ONE: Cell<bool> = const { Cell::new(false) };
}

/// Asks `interrupted`, but on a communication thread: there signals are not handled, and whoever
/// waits for it asks.
pub(crate) fn is_interrupted(interrupted: fn() -> bool) -> bool {
    !IS_ONE.get() && interrupted()
}

/// Runs `deed`, which may make several operations of `comm`, after everything that was issued
/// before: on the communication thread where there is [one](Communicator::queue), else at once.
///
/// The deed makes its operations with the communicator that it is given; they run where it does.
/// A panic of it on the communication thread is an error of the handle and ends the world.
pub fn issue<T: Send + 'static>(
    comm: &dyn Communicator,
    deed: impl FnOnce(&dyn Communicator) -> Result<T, CommError> + Send + 'static,
) -> Handle<T> {
    match comm.queue() {
        Some(queue) => queue.issue(deed),
        None => Handle::done(deed(comm)),
    }
}

impl Queue {
    /// Starts the thread. See [`overlapped`](crate::overlapped()) for `interrupted`.
    pub(crate) fn start(
        inner: Arc<dyn Communicator>,
        interrupted: fn() -> bool,
    ) -> Result<Self, CommError> {
        let (jobs, issued) = channel::<Job>();
        let running = thread::Builder::new()
            .name("oxizero-comm".to_owned())
            .spawn(move || {
                IS_ONE.set(true);
                issued.into_iter().for_each(|job| job());
            })
            .map_err(|error| CommError::System { operation: THREAD, why: error.to_string() })?;
        let (jobs, running) = (Some(jobs), Some(running));
        Ok(Self { inner, thread: Arc::new(Thread { jobs, running, interrupted }) })
    }

    /// The way of another group of the same rank to the same thread.
    pub(crate) fn of_group(&self, inner: Arc<dyn Communicator>) -> Self {
        Self { inner, thread: Arc::clone(&self.thread) }
    }

    /// The communicator whose operations run on the thread.
    pub(crate) fn inner(&self) -> &dyn Communicator {
        &*self.inner
    }

    pub(crate) fn issue<T: Send + 'static>(
        &self,
        deed: impl FnOnce(&dyn Communicator) -> Result<T, CommError> + Send + 'static,
    ) -> Handle<T> {
        let (done, result) = sync_channel(1);
        let inner = Arc::clone(&self.inner);
        let job = move || {
            let result = catch_unwind(AssertUnwindSafe(|| deed(&*inner)));
            let result = result.unwrap_or_else(|panic| Err(panicked(&*inner, &*panic)));
            // Whoever waits may drop the communicator next, which is to be the last of it.
            drop(inner);
            // Where the handle was dropped, what the operation owned goes here.
            let _unheeded = done.send(result);
        };
        let jobs = self.thread.jobs.as_ref().expect("the thread runs until its last queue is gone");
        // A thread that is gone drops the job, and with it the sender: the handle's wait says so.
        let _unheeded = jobs.send(Box::new(job));
        let (inner, interrupted) = (Arc::clone(&self.inner), self.thread.interrupted);
        Handle::pending(Pending { result, inner, interrupted })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.jobs.take();
        if let Some(running) = self.running.take() {
            // Jobs catch their panics.
            let _unheeded = running.join();
        }
    }
}

impl<T> Pending<T> {
    pub(crate) fn wait(self) -> Result<T, CommError> {
        loop {
            match self.result.recv_timeout(LOOK_EVERY) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {
                    if (self.interrupted)() {
                        self.inner.abort(INTERRUPTED);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(CommError::System { operation: THREAD, why: "it ended".into() });
                }
            }
        }
    }
}

const THREAD: &str = "the communication thread";

/// Why a rank gives up that is interrupted.
pub(crate) const INTERRUPTED: &str = "it was interrupted";

/// The error of an operation that panicked, which the others are told, too.
fn panicked(comm: &dyn Communicator, panic: &(dyn Any + Send)) -> CommError {
    let said = panic.downcast_ref::<&str>().copied();
    let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let why = format!("a panic: {}", said.unwrap_or("without words"));
    comm.abort(&format!("{THREAD}: {why}"));
    CommError::System { operation: THREAD, why }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queue")
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}
