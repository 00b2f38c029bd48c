//! The order in which a rank's operations run where they run on a thread of their own.

use std::any::Any;
use std::cell::Cell;
use std::convert::Infallible;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::waits::LOOK_EVERY;
use crate::{Beside, CommError, Communicator, Handle, Mark};

/// One group's way to a rank's communication thread. All groups of the rank have the same thread,
/// so that operations run in the order in which they were issued, whichever group they are of.
pub struct Queue {
    inner: Arc<dyn Communicator>,
    thread: Arc<Thread>,
}

/// Runs jobs one after the other. Dropping it waits for those that were issued, on which other
/// ranks count, unless the rank is interrupted, and ends the thread.
struct Thread {
    jobs: Option<Sender<Job>>,
    running: Option<JoinHandle<()>>,
    /// Hangs up when the thread ends.
    ended: Mutex<Receiver<Infallible>>,
    /// The group that it was started for, which ends what the thread waits in.
    first: Arc<dyn Communicator>,
    beside: Beside,
    unwound: Unwound,
}

type Job = Box<dyn FnOnce() + Send>;

/// An operation that runs, or is about to.
pub(crate) struct Pending<T> {
    /// What comes of it; `None` once that was taken.
    ended: Option<Receiver<Ended<T>>>,
    inner: Arc<dyn Communicator>,
    beside: Beside,
    unwound: Unwound,
}

/// What came of an operation, with the mark where a device has done its work.
type Ended<T> = (Result<T, CommError>, Option<Box<dyn Mark>>);

/// What the first operation unwound with that did so otherwise than in a panic.
type Unwound = Arc<Mutex<Option<Box<dyn Any + Send>>>>;

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
/// A panic of it on the communication thread is an error of the handle and ends the world. So does
/// what unwinds with another value than a panic's words; the first wait that fails unwinds with it.
/// What a deed owns it returns, so that it is freed after the wait.
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
    /// Starts the thread.
    pub(crate) fn start(inner: Arc<dyn Communicator>, beside: Beside) -> Result<Self, CommError> {
        let (jobs, issued) = channel::<Job>();
        let (alive, ended) = channel();
        let running = thread::Builder::new()
            .name("oxizero-comm".to_owned())
            .spawn(move || {
                IS_ONE.set(true);
                issued.into_iter().for_each(|job| job());
                drop(alive);
            })
            .map_err(|error| CommError::System { operation: THREAD, why: error.to_string() })?;
        let (jobs, running) = (Some(jobs), Some(running));
        let (first, ended) = (Arc::clone(&inner), Mutex::new(ended));
        let (streams, unwound) = (beside.streams.clone(), Unwound::default());
        let thread = Thread { jobs, running, ended, first, beside, unwound };
        let queue = Self { inner, thread: Arc::new(thread) };
        if let Some(streams) = streams {
            let begin = move |_: &dyn Communicator| {
                streams.begin();
                Ok(())
            };
            queue.issue(begin).wait()?;
        }
        Ok(queue)
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
        let (done, ended) = sync_channel(1);
        let (inner, beside) = (Arc::clone(&self.inner), self.thread.beside.clone());
        let unwound = Arc::clone(&self.thread.unwound);
        let asked = beside.mark();
        let job = move || {
            let deed = || {
                pass(asked);
                (deed(&*inner), beside.mark())
            };
            let ended = catch_unwind(AssertUnwindSafe(deed)).unwrap_or_else(|panic| {
                let why = (beside.why)(&*panic);
                inner.abort(&why);
                // A panic is an error as any other; the rest is for who knows what it is.
                if !panic.is::<&str>() && !panic.is::<String>() {
                    lock(&unwound).get_or_insert(panic);
                }
                (Err(CommError::System { operation: THREAD, why }), None)
            });
            // Whoever waits may drop the communicator next, which is to be the last of it.
            drop(inner);
            // Where the handle was dropped, what the operation owned goes here.
            let _unheeded = done.send(ended);
        };
        let jobs = self.thread.jobs.as_ref().expect("the thread runs until its last queue is gone");
        // A thread that is gone drops the job, and with it the sender: the handle's wait says so.
        let _unheeded = jobs.send(Box::new(job));
        let (inner, beside) = (Arc::clone(&self.inner), self.thread.beside.clone());
        let unwound = Arc::clone(&self.thread.unwound);
        Handle::pending(Pending { ended: Some(ended), inner, beside, unwound })
    }
}

impl Beside {
    /// What the calling thread has asked the device for so far, if one works later.
    fn mark(&self) -> Option<Box<dyn Mark>> {
        self.streams.as_ref().map(|streams| streams.mark())
    }
}

/// What the calling thread asks for from here on comes after the mark.
fn pass(mark: Option<Box<dyn Mark>>) {
    if let Some(mark) = mark {
        mark.wait();
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.jobs.take();
        let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
        while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK_EVERY) {
            if (self.beside.interrupted)() {
                self.first.abort(INTERRUPTED);
            }
        }
        if let Some(running) = self.running.take() {
            // Jobs catch their panics.
            let _unheeded = running.join();
        }
    }
}

impl<T> Pending<T> {
    pub(crate) fn wait(mut self) -> Result<T, CommError> {
        let ended = self.ended.take().expect("an operation is waited for once");
        let (result, mark) = self.end(&ended)?;
        pass(mark);
        if let (true, Some(panic)) = (result.is_err(), lock(&self.unwound).take()) {
            resume_unwind(panic);
        }
        result
    }

    fn end(&self, ended: &Receiver<Ended<T>>) -> Result<Ended<T>, CommError> {
        loop {
            match ended.recv_timeout(LOOK_EVERY) {
                Ok(ended) => return Ok(ended),
                Err(RecvTimeoutError::Timeout) => {
                    if (self.beside.interrupted)() {
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

impl<T> Drop for Pending<T> {
    /// A device may still be at work on what the operation owns, which is freed here.
    fn drop(&mut self) {
        let Some(ended) = self.ended.take().filter(|_| self.beside.streams.is_some()) else {
            return;
        };
        let pass = || self.end(&ended).map(|(owned, mark)| (pass(mark), owned));
        // Nobody has asked how it went.
        let _unheeded = catch_unwind(AssertUnwindSafe(pass));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const THREAD: &str = "the communication thread";

/// Why a rank gives up that is interrupted.
pub(crate) const INTERRUPTED: &str = "it was interrupted";

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

#[cfg(test)]
mod tests {
    use oxizero_core::WorldSize;

    use super::*;
    use crate::streams::Streams;
    use crate::threads;

    /// Notes who does what: `true` on the communication thread. Marks are numbered.
    #[derive(Default)]
    struct Noted(Mutex<(usize, Vec<(bool, String)>)>);

    struct NotedMark(Arc<Noted>, usize);

    impl Noted {
        fn note(&self, what: impl Into<String>) {
            self.0.lock().unwrap().1.push((IS_ONE.get(), what.into()));
        }

        fn next(&self) -> usize {
            let (marks, _) = &mut *self.0.lock().unwrap();
            *marks += 1;
            *marks
        }
    }

    struct Device(Arc<Noted>);

    impl Streams for Device {
        fn begin(&self) {
            self.0.note("begin");
        }

        fn mark(&self) -> Box<dyn Mark> {
            let mark = self.0.next();
            self.0.note(format!("mark {mark}"));
            Box::new(NotedMark(Arc::clone(&self.0), mark))
        }
    }

    impl Mark for NotedMark {
        fn wait(self: Box<Self>) {
            self.0.note(format!("wait {}", self.1));
        }
    }

    fn queue(noted: &Arc<Noted>) -> Queue {
        let comm = threads::group(WorldSize::ONE).pop().unwrap();
        let streams: Arc<dyn Streams> = Arc::new(Device(Arc::clone(noted)));
        Queue::start(Arc::from(comm), Beside { streams: Some(streams), ..Beside::default() })
            .unwrap()
    }

    const AROUND: [(bool, &str); 5] =
        [(false, "mark 3"), (true, "wait 3"), (true, "deed"), (true, "mark 4"), (false, "wait 4")];

    fn noted_after_begin(noted: &Noted) -> Vec<(bool, String)> {
        let all = noted.0.lock().unwrap().1.clone();
        assert_eq!(all[2], (true, "begin".to_owned()), "{all:?}");
        all[5..].to_vec()
    }

    #[test]
    fn a_device_does_what_comes_before_an_operation_first_and_what_comes_after_it_last() {
        let noted = Arc::new(Noted::default());
        let queue = queue(&noted);
        let on_thread = Arc::clone(&noted);
        let deed = move |_: &dyn Communicator| {
            on_thread.note("deed");
            Ok(())
        };
        queue.issue(deed).wait().unwrap();
        assert_eq!(noted_after_begin(&noted), AROUND.map(|(on, what)| (on, what.to_owned())));
    }

    #[test]
    fn what_nobody_waits_for_is_freed_after_the_device_has_done_it() {
        struct Owned(Arc<Noted>);
        impl Drop for Owned {
            fn drop(&mut self) {
                self.0.note("freed");
            }
        }
        let noted = Arc::new(Noted::default());
        let queue = queue(&noted);
        let owned = Owned(Arc::clone(&noted));
        drop(queue.issue(move |_| Ok(owned)));
        let all = noted_after_begin(&noted);
        assert_eq!(
            all[all.len() - 2..],
            [(false, "wait 4"), (false, "freed")].map(|(on, what)| (on, what.to_owned()))
        );
    }

    #[test]
    fn what_an_operation_unwinds_with_is_its_waiters_and_ends_the_world() {
        let comm: Arc<dyn Communicator> = Arc::from(threads::group(WorldSize::ONE).pop().unwrap());
        let queue = Queue::start(Arc::clone(&comm), Beside::default()).unwrap();
        let first = queue.issue(|_| -> Result<(), CommError> { resume_unwind(Box::new(7_u8)) });
        let next = queue.issue(|comm| comm.barrier());
        let unwound = catch_unwind(AssertUnwindSafe(|| next.wait())).unwrap_err();
        assert!(first.wait().is_err());
        assert_eq!(unwound.downcast_ref(), Some(&7_u8));
        let why = comm.barrier().unwrap_err().to_string();
        assert!(why.contains("a panic on its communication thread: without words"), "{why}");
    }
}
