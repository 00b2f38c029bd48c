//! What ranks write: passed on as it comes, its last lines kept.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Lines kept: a Python traceback and what led to it.
const LINES_KEPT: usize = 100;
/// Bytes kept as one line where there is no end of it, as in a progress bar.
const LINE_BYTES_MAX: usize = 4096;
/// Bytes of a line that are held back for its end.
const HELD_BYTES_MAX: usize = 1 << 20;
/// How long output may still come when its writer has ended, from whoever else has the pipe.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A rank's output on its way, read by a thread.
pub(crate) struct Forwarded {
    tail: Arc<Mutex<Tail>>,
    thread: JoinHandle<()>,
}

/// Passes on all that comes from `from`: whole lines with a prefix, which may be empty, or without
/// one whatever comes, at once.
pub(crate) fn forward(
    mut from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    prefix: Option<String>,
) -> Forwarded {
    let tail = Arc::<Mutex<Tail>>::default();
    let kept = Arc::clone(&tail);
    let thread = thread::spawn(move || {
        let mut chunk = [0; 8192];
        let mut lines = prefix.map(Lines::new);
        while let Ok(length @ 1..) = from.read(&mut chunk) {
            let chunk = &chunk[..length];
            kept.lock().unwrap_or_else(PoisonError::into_inner).add(chunk);
            let passed = match &mut lines {
                None => to.write_all(chunk),
                Some(lines) => lines.pass(chunk, &mut to),
            };
            if passed.is_err() {
                // Nobody listens any more; the rank learns it as if it had written there itself.
                return;
            }
        }
        let _unheard = lines.map_or(Ok(()), |mut lines| lines.end(&mut to));
    });
    Forwarded { tail, thread }
}

impl Forwarded {
    /// The last of it, once its writer has ended.
    pub(crate) fn tail(self) -> Tail {
        let until = Instant::now() + LAST_WORDS;
        while !self.thread.is_finished() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        std::mem::take(&mut *self.tail.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Whole lines, each with a prefix, which may be empty.
struct Lines {
    prefix: String,
    begun: Vec<u8>,
}

impl Lines {
    fn new(prefix: String) -> Self {
        Self { prefix, begun: Vec::new() }
    }

    fn pass(&mut self, chunk: &[u8], to: &mut impl Write) -> io::Result<()> {
        for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
            self.begun.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.begun.len() > HELD_BYTES_MAX {
                self.write(to)?;
            }
        }
        Ok(())
    }

    /// Passes on a line that has no end, with one: others' lines are not to go on in it.
    fn end(&mut self, to: &mut impl Write) -> io::Result<()> {
        if !self.begun.is_empty() {
            self.begun.push(b'\n');
        }
        self.write(to)
    }

    /// In one piece, so that the ranks' lines do not mix.
    fn write(&mut self, to: &mut impl Write) -> io::Result<()> {
        if !self.begun.is_empty() {
            let line = [self.prefix.as_bytes(), &self.begun].concat();
            self.begun.clear();
            to.write_all(&line)?;
        }
        to.flush()
    }
}

/// The last lines of some output, and when each came.
#[derive(Default)]
pub(crate) struct Tail {
    lines: VecDeque<(Instant, Vec<u8>)>,
    begun: Vec<u8>,
}

impl Tail {
    fn add(&mut self, chunk: &[u8]) {
        for piece in chunk.split_inclusive(|byte| *byte == b'\n') {
            self.begun.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.begun.len() > LINE_BYTES_MAX {
                self.lines.push_back((Instant::now(), std::mem::take(&mut self.begun)));
            }
            if self.lines.len() > LINES_KEPT {
                self.lines.pop_front();
            }
        }
    }

    /// When Python began to say why it fails. It does so before it takes itself down, which may
    /// take longer than others need to notice and to fail of it.
    pub(crate) fn traceback_at(&self) -> Option<Instant> {
        let traceback = |line: &[u8]| line.starts_with(b"Traceback (most recent call last)");
        self.lines.iter().rev().find(|(_, line)| traceback(line)).map(|(at, _)| *at)
    }

    /// At most so many lines, the last ones, as text without its ends.
    pub(crate) fn last(&self, lines: usize) -> Vec<String> {
        let whole = self.lines.iter().map(|(_, line)| line.as_slice());
        let all = whole.chain((!self.begun.is_empty()).then_some(self.begun.as_slice()));
        // Of a line that was written over, the last version.
        let shown = |line: &[u8]| {
            let text = String::from_utf8_lossy(line);
            let text = text.trim_end();
            text.rsplit('\r').next().unwrap_or(text).to_owned()
        };
        let mut all: Vec<_> = all.map(shown).filter(|line| !line.is_empty()).collect();
        all.split_off(all.len().saturating_sub(lines))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tail(chunks: &[&str]) -> Tail {
        let mut tail = Tail::default();
        chunks.iter().for_each(|chunk| tail.add(chunk.as_bytes()));
        tail
    }

    #[test]
    fn the_last_lines_are_whole_whatever_the_chunks() {
        let tail = tail(&["one\ntw", "o\n\n10%\r20%\r30", "%\nrest"]);
        assert_eq!(tail.last(9), ["one", "two", "30%", "rest"]);
        assert_eq!(tail.last(2), ["30%", "rest"]);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut tail = tail(&["Traceback (most recent call last):\n"]);
        assert!(tail.traceback_at().is_some());
        for _ in 0..1000 {
            tail.add(&[b'x'; 5000]);
        }
        assert_eq!(tail.lines.len(), LINES_KEPT);
        assert!(tail.traceback_at().is_none());
    }

    #[test]
    fn prefixed_lines_are_whole() {
        let (mut lines, mut written) = (Lines::new("[1] ".into()), Vec::new());
        lines.pass(b"a\nb", &mut written).unwrap();
        lines.pass(b"c\n\nd", &mut written).unwrap();
        lines.end(&mut written).unwrap();
        assert_eq!(written, b"[1] a\n[1] bc\n[1] \n[1] d\n");
        let (mut lines, mut written) = (Lines::new(String::new()), Vec::new());
        lines.pass(b"a\nb", &mut written).unwrap();
        assert_eq!(written, b"a\n");
        lines.end(&mut written).unwrap();
        assert_eq!(written, b"a\nb\n");
        lines.end(&mut written).unwrap();
        assert_eq!(written, b"a\nb\n");
    }
}
