//! Forks of this process, and signals that it gets: a fork has a copy of what a rank has, and is no
//! rank; a rank that waits for another wants to hear of Ctrl-C.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use crate::error;

/// What only the process that made it may use, and free: it is left alone in a fork, where freeing
/// it would free what the rank has.
pub(crate) struct OfProcess<T: Send> {
    value: Option<T>,
    process: u32,
}

impl<T: Send> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// The value; an error in a fork of the process that made it. To be asked before anything is
    /// waited for: the thread that has it may not be in the fork.
    pub(crate) fn here(&self) -> PyResult<&T> {
        let value = self.value.as_ref().expect("the value is taken by drop alone");
        if self.is_here() { Ok(value) } else { Err(error::forked()) }
    }

    fn is_here(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T: Send> Drop for OfProcess<T> {
    /// It may wait for a thread that calls Python, which it does without the interpreter's lock.
    fn drop(&mut self) {
        let value = self.value.take();
        if !self.is_here() {
            return std::mem::forget(value);
        }
        let mut value = Some(value);
        Python::try_attach(|py| {
            let value = value.take();
            py.detach(move || drop(value));
        });
    }
}

/// What a signal's handler raised while a rank waited.
static RAISED: Mutex<Option<PyErr>> = Mutex::new(None);

/// Lets Python's signal handlers run; whether one of them raised something, such as Ctrl-C's.
pub(crate) fn interrupted() -> bool {
    let handled = Python::attach(|py| py.check_signals());
    let Err(error) = handled else { return false };
    *RAISED.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    true
}

/// What made a wait end, if a signal did.
pub(crate) fn interrupt() -> Option<PyErr> {
    RAISED.lock().unwrap_or_else(PoisonError::into_inner).take()
}
