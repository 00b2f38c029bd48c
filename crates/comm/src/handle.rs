//! Work in flight.

use crate::CommError;

/// An operation that was issued; it owns its buffers until it is waited for.
#[derive(Debug)]
#[must_use = "an operation is complete only when it was waited for"]
pub struct Handle<T> {
    done: Result<T, CommError>,
}

impl<T> Handle<T> {
    /// An operation that ran to its end when it was issued.
    pub fn done(result: Result<T, CommError>) -> Self {
        Self { done: result }
    }

    /// Waits for the operation, and takes its buffers back.
    pub fn wait(self) -> Result<T, CommError> {
        self.done
    }
}
