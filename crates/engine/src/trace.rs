//! What an engine did, and when, as a file that Perfetto and Chrome's tracing page show.
//!
//! The file is a JSON array of events; source: "Trace Event Format", its duration and metadata
//! events. A process is a rank. Times of several ranks' files of one machine fit together.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant, SystemTime};

use oxizero_core::{Rank, WorldSize};

use crate::{Observer, Span};

/// Writes a file of events. It is complete when it was [finished](Self::finish), or dropped; what
/// it has after each window is a trace too, which lacks only the bracket at its end.
pub struct Trace {
    rank: Rank,
    started: Instant,
    /// Since 1970, when it started.
    epoch: Duration,
    file: Mutex<EventFile>,
}

struct EventFile {
    out: BufWriter<File>,
    /// Those that were seen; a thread's index is its number in the file.
    threads: Vec<ThreadId>,
    state: State,
}

enum State {
    /// So far every event was written.
    Open,
    Failed(io::Error),
    Finished,
}

impl Trace {
    /// Starts the file of `rank`: of a world of one it is `path` itself, else `path` with the rank
    /// before its extension, as `trace.2.json`. A file that is there already is overwritten.
    pub fn create(path: &Path, rank: Rank, world_size: WorldSize) -> io::Result<Self> {
        let mut out = BufWriter::new(File::create(file_of(path, rank, world_size))?);
        let text = format!("rank {rank}");
        write!(out, "[\n{}", metadata(rank, 0, "process_name", &text))?;
        let epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let file = Mutex::new(EventFile { out, threads: Vec::new(), state: State::Open });
        Ok(Self { rank, started: Instant::now(), epoch, file })
    }

    /// Ends the file; nothing is written after it. Returns the first error there was.
    pub fn finish(&self) -> io::Result<()> {
        let mut file = self.file();
        match std::mem::replace(&mut file.state, State::Finished) {
            State::Open => file.out.write_all(b"\n]\n").and_then(|()| file.out.flush()),
            State::Failed(error) => Err(error),
            State::Finished => Ok(()),
        }
    }

    fn file(&self) -> MutexGuard<'_, EventFile> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, phase: char, span: Span) {
        let now = self.epoch + self.started.elapsed();
        let mut file = self.file();
        if !matches!(file.state, State::Open) {
            return;
        }
        if let Err(error) = file.write(self.rank, now, phase, span) {
            file.state = State::Failed(error);
        }
    }
}

impl EventFile {
    fn write(&mut self, rank: Rank, now: Duration, phase: char, span: Span) -> io::Result<()> {
        let thread = self.thread(rank)?;
        let (micros, nanos) = (now.as_micros(), now.subsec_nanos() % 1000);
        write!(
            self.out,
            ",\n{{\"ph\":\"{phase}\",\"pid\":{rank},\"tid\":{thread},\
             \"ts\":{micros}.{nanos:03},\"name\":\"{span}\"}}"
        )
    }

    /// The number of the thread that calls, which is named when it first does.
    fn thread(&mut self, rank: Rank) -> io::Result<usize> {
        let caller = thread::current();
        if let Some(index) = self.threads.iter().position(|known| *known == caller.id()) {
            return Ok(index);
        }
        let index = self.threads.len();
        self.threads.push(caller.id());
        let unnamed = || format!("thread {index}");
        let name = caller.name().map_or_else(unnamed, |name| name.escape_default().to_string());
        write!(self.out, ",\n{}", metadata(rank, index, "thread_name", &name))?;
        Ok(index)
    }
}

impl Observer for Trace {
    fn begin(&self, span: Span) {
        self.write('B', span);
    }

    fn end(&self, span: Span) {
        self.write('E', span);
    }

    fn window_ended(&self) {
        let mut file = self.file();
        if !matches!(file.state, State::Open) {
            return;
        }
        if let Err(error) = file.out.flush() {
            file.state = State::Failed(error);
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // Whoever wants to know calls it.
        let _unheeded = self.finish();
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace(rank {})", self.rank)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward(unit) => write!(f, "forward {unit}"),
            Self::BackwardPass => f.write_str("backward pass"),
            Self::Backward(unit) => write!(f, "backward {unit}"),
            Self::Reduce(bucket) => write!(f, "reduce {bucket}"),
            Self::Gather(bucket) => write!(f, "gather {bucket}"),
            Self::Update(bucket) => write!(f, "update {bucket}"),
            Self::Publish(bucket) => write!(f, "publish {bucket}"),
            Self::Exchange => f.write_str("exchange"),
            Self::Wait(bucket) => write!(f, "wait {bucket}"),
        }
    }
}

fn file_of(path: &Path, rank: Rank, world_size: WorldSize) -> PathBuf {
    if world_size == WorldSize::ONE {
        return path.to_path_buf();
    }
    let extension = path.extension().map(|extension| extension.to_string_lossy());
    path.with_extension(match extension {
        Some(extension) => format!("{rank}.{extension}"),
        None => rank.to_string(),
    })
}

fn metadata(rank: Rank, thread: usize, kind: &str, name: &str) -> String {
    format!(
        "{{\"ph\":\"M\",\"pid\":{rank},\"tid\":{thread},\"name\":\"{kind}\",\
         \"args\":{{\"name\":\"{name}\"}}}}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_of_several_has_a_file_of_its_own() {
        let file = |path: &str, ranks| {
            let world_size = WorldSize::new(ranks).unwrap();
            file_of(Path::new(path), Rank(2), world_size).display().to_string()
        };
        assert_eq!(file("a.b/trace.json", 1), "a.b/trace.json");
        assert_eq!(file("a.b/trace.json", 4), "a.b/trace.2.json");
        assert_eq!(file("trace", 4), "trace.2");
    }
}
