//! Forks of this process, and signals that it gets: a fork has a copy of what a rank has, and is no
//! rank; a rank that waits for another wants to hear of Ctrl-C.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

/// What only the process that made it may use, and free: it is left alone in a fork, where freeing
/// it would free what the rank has.
pub(crate) struct OfProcess<T> {
    value: Option<T>,
    process: u32,
}

const ALIVE: &str = "the value is taken by drop alone";

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// Whether this process made it, and is not a fork of the one that did.
    pub(crate) fn is_here(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Deref for OfProcess<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect(ALIVE)
    }
}

impl<T> DerefMut for OfProcess<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect(ALIVE)
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            std::mem::forget(self.value.take());
        }
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
