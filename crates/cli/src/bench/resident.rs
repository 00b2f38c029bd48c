//! The memory that a rank takes, as the system counts it.
//!
//! A rank's process holds anonymous memory of its own, and the ranks hold one shared memory, of
//! which each uses a part for its buffers. A rank is counted all of its anonymous memory
//! (`RssAnon`) and an equal share of the pages that the shared memory has (blocks of its memfd),
//! for all ranks allocate the same. So every page is counted once over all ranks: pages of others
//! that a rank reads count nothing more, unlike in `VmRSS` and `VmHWM`. What the allocators keep
//! for later is counted, though nobody uses it; code and other files are not.
//!
//! The system keeps no maximum of these counts, so that a thread looks at them again and again:
//! what is there for less than a millisecond may be missed.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use oxizero_comm::Communicator;
use oxizero_core::Bytes;

/// How long the thread rests between two looks, which take a small part of this.
const INTERVAL: Duration = Duration::from_millis(1);

/// What this rank takes now.
pub(crate) fn resident(comm: &dyn Communicator) -> io::Result<Bytes> {
    let shared = Bytes(comm.allocated().resident.0 / comm.world_size().get());
    let status = fs::read_to_string("/proc/self/status")?;
    let anonymous =
        field(&status, "RssAnon:").ok_or_else(|| io::Error::other("no RssAnon in status"))?;
    Ok(anonymous + shared)
}

/// What the machine has left for new memory.
pub(crate) fn available() -> io::Result<Bytes> {
    let info = fs::read_to_string("/proc/meminfo")?;
    field(&info, "MemAvailable:").ok_or_else(|| io::Error::other("no MemAvailable in meminfo"))
}

/// Does `deed` on this thread; returns the most that this rank took meanwhile, too.
pub(crate) fn peak<T>(comm: &dyn Communicator, deed: impl FnOnce() -> T) -> io::Result<(T, Bytes)> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(comm, &done));
        let end = End(&done);
        let result = deed();
        drop(end);
        let peak = watcher.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((result, peak))
    })
}

/// Ends the watch when it is dropped, by a panic too.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

fn watch(comm: &dyn Communicator, done: &AtomicBool) -> io::Result<Bytes> {
    let mut peak = resident(comm)?;
    while !done.load(Relaxed) {
        thread::sleep(INTERVAL);
        peak = peak.max(resident(comm)?);
    }
    Ok(peak)
}

/// A size among the lines of a file in /proc.
fn field(lines: &str, name: &str) -> Option<Bytes> {
    let line = lines.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib << 10))
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    use oxizero_comm::threads;
    use oxizero_core::WorldSize;

    use super::*;

    #[test]
    fn the_systems_answer_is_read_as_bytes() {
        assert_eq!(field("VmRSS: 9 kB\nRssAnon:\t  12 kB\n", "RssAnon:"), Some(Bytes(12 << 10)));
        assert_eq!(field("VmRSS: 9 kB\n", "RssAnon:"), None);
    }

    #[test]
    fn what_is_there_for_a_while_is_in_the_peak() {
        let comm = threads::group(WorldSize::ONE).remove(0);
        let base = resident(&*comm).unwrap();
        let hold = || {
            let held = black_box(vec![1_u8; 64 << 20]);
            thread::sleep(20 * INTERVAL);
            held.len()
        };
        let (len, peak) = peak(&*comm, hold).unwrap();
        // Other tests run in this process: it may have given back something meanwhile.
        assert!(peak.0 > base.0 + len / 2, "{peak} over {base}");
    }
}
