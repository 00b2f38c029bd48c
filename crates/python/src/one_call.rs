//! One call at a time.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use pyo3::prelude::*;
use pyo3::sync::MutexExt;

use crate::error;

/// What one call has at a time. Other threads wait for it; the thread of the call itself, which
/// Python may bring back here in a signal's handler or from within torch, would wait for ever, and
/// is refused.
pub(crate) struct OneCall<T> {
    value: Mutex<T>,
    /// The thread that has the value. A thread finds itself here only if it does.
    holder: Mutex<Option<ThreadId>>,
}

/// The value, for the length of a call.
pub(crate) struct Held<'a, T> {
    value: MutexGuard<'a, T>,
    holder: &'a Mutex<Option<ThreadId>>,
}

impl<T> OneCall<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), holder: Mutex::default() }
    }

    /// Waits; for threads that do not hold the interpreter's lock.
    pub(crate) fn hold(&self) -> PyResult<Held<'_, T>> {
        self.refuse_holder()?;
        // A panic in an earlier call leaves the value's own checks in place.
        Ok(self.held(self.value.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Waits without the interpreter's lock, which a call of another thread may want meanwhile.
    pub(crate) fn hold_attached(&self, py: Python<'_>) -> PyResult<Held<'_, T>>
    where
        T: Send,
    {
        self.refuse_holder()?;
        Ok(self.held(self.value.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)))
    }

    fn refuse_holder(&self) -> PyResult<()> {
        match *lock(&self.holder) == Some(thread::current().id()) {
            true => Err(error::in_a_call()),
            false => Ok(()),
        }
    }

    fn held<'a>(&'a self, value: MutexGuard<'a, T>) -> Held<'a, T> {
        *lock(&self.holder) = Some(thread::current().id());
        Held { value, holder: &self.holder }
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Held<'_, T> {
    /// Before the value's own guard goes.
    fn drop(&mut self) {
        *lock(self.holder) = None;
    }
}

fn lock(holder: &Mutex<Option<ThreadId>>) -> MutexGuard<'_, Option<ThreadId>> {
    holder.lock().unwrap_or_else(PoisonError::into_inner)
}
