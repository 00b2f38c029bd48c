//! What `src/shm/word.rs` gives, under a scheduler that decides who takes the next step.
//!
//! A sleeper sleeps until it is woken, without end: a wake-up that is lost is a deadlock here,
//! where a real one only costs a slice of time.

use std::collections::HashMap;
use std::time::Duration;

use shuttle::sync::{Condvar, Mutex};

pub(crate) use shuttle::hint::spin_loop;
pub(crate) use shuttle::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::SeqCst};

shuttle::lazy_static! {
    /// By address of a word: how often those who sleep on it were woken.
    static ref WAKES: Mutex<HashMap<usize, usize>> = Mutex::new(HashMap::new());
    static ref WOKEN: Condvar = Condvar::new();
}

fn key(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word).addr()
}

pub(crate) fn sleep_while(word: &AtomicU32, value: u32, _slice: Duration) {
    let mut wakes = WAKES.lock().unwrap();
    if word.load(SeqCst) != value {
        return;
    }
    let count = |wakes: &HashMap<usize, usize>| wakes.get(&key(word)).copied();
    let before = count(&wakes);
    while count(&wakes) == before {
        wakes = WOKEN.wait(wakes).unwrap();
    }
}

pub(crate) fn wake_all(word: &AtomicU32) {
    *WAKES.lock().unwrap().entry(key(word)).or_default() += 1;
    WOKEN.notify_all();
}
