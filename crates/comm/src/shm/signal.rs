//! A counter that other processes wait for: spinning first, then asleep.

use std::time::Duration;

use super::word::{AtomicU32, SeqCst, sleep_while, spin_loop, wake_all};

/// A counter in shared memory, which one process advances.
#[derive(Default)]
#[repr(C, align(64))]
pub(super) struct Signal {
    value: AtomicU32,
    /// Processes that sleep, or are about to; nobody is woken while there are none.
    waiters: AtomicU32,
}

/// So often a waiter checks by itself: it may be woken between its check and its sleep.
const SLICE: Duration = Duration::from_millis(50);

impl Signal {
    /// Advances the counter, and wakes who waits for it.
    pub(super) fn post(&self, value: u32) {
        self.value.store(value, SeqCst);
        self.wake();
    }

    /// Advances the counter by one; any process may.
    pub(super) fn bump(&self) {
        self.value.fetch_add(1, SeqCst);
        self.wake();
    }

    pub(super) fn value(&self) -> u32 {
        self.value.load(SeqCst)
    }

    /// Whether the counter, which may wrap around, has come to `value`.
    pub(super) fn has_reached(&self, value: u32) -> bool {
        self.value().wrapping_sub(value).cast_signed() >= 0
    }

    /// Makes everyone who waits check again.
    pub(super) fn wake(&self) {
        if self.waiters.load(SeqCst) > 0 {
            wake_all(&self.value);
        }
    }

    /// Waits until the counter has come to `value`: `spins` turns awake, then asleep. Before each
    /// sleep `check` may give up.
    pub(super) fn wait<E>(
        &self,
        value: u32,
        spins: u32,
        mut check: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        for _ in 0..spins {
            if self.has_reached(value) {
                return Ok(());
            }
            spin_loop();
        }
        self.waiters.fetch_add(1, SeqCst);
        let result = loop {
            let now = self.value();
            if self.has_reached(value) {
                break Ok(());
            }
            if let Err(error) = check() {
                break Err(error);
            }
            sleep_while(&self.value, now, SLICE);
        };
        self.waiters.fetch_sub(1, SeqCst);
        result
    }

    /// Back to zero; nobody may be waiting.
    pub(super) fn reset(&self) {
        self.value.store(0, SeqCst);
        self.waiters.store(0, SeqCst);
    }
}
