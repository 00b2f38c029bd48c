//! Work in flight.

use crate::CommError;
use crate::queue::Pending;

/// An operation that was issued; it owns its buffers until it is waited for. One that nobody waits
/// for runs all the same, and its buffers go with it.
#[derive(Debug)]
#[must_use = "an operation is complete only when it was waited for"]
pub struct Handle<T> {
    state: State<T>,
}

#[derive(Debug)]
enum State<T> {
    Done(Result<T, CommError>),
    Pending(Pending<T>),
}

impl<T> Handle<T> {
    /// An operation that ran to its end when it was issued.
    pub fn done(result: Result<T, CommError>) -> Self {
        Self { state: State::Done(result) }
    }

    /// An operation that runs in its turn, on another thread.
    pub(crate) fn pending(pending: Pending<T>) -> Self {
        Self { state: State::Pending(pending) }
    }

    /// Waits for the operation, and takes its buffers back.
    pub fn wait(self) -> Result<T, CommError> {
        match self.state {
            State::Done(result) => result,
            State::Pending(pending) => pending.wait(),
        }
    }
}
