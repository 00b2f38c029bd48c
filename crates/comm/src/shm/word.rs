//! The words of shared memory that ranks meet on, and what they do while they wait.
//!
//! The signals and the control pages are built of nothing else, so that a model of these words
//! (`tests/shm_model`) runs the same code under every order of steps that it can think of.

use std::time::Duration;

use rustix::thread::futex;

pub(super) use std::hint::spin_loop;
pub(super) use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst};

/// Sleeps until somebody wakes those who sleep on `word`, at most for `slice`; not at all where it
/// is not `value` any more. It may return early, as on a signal.
pub(super) fn sleep_while(word: &AtomicU32, value: u32, slice: Duration) {
    let slice = slice.try_into().expect("a slice is a small number of nanoseconds");
    // Whatever it returns, the caller checks again.
    let _ = futex::wait(word, futex::Flags::empty(), value, Some(&slice));
}

/// Wakes everyone who sleeps on `word`, in all processes.
pub(super) fn wake_all(word: &AtomicU32) {
    // The only errors are of addresses that are no memory.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}
