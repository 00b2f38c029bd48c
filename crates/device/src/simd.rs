//! What is asked of the CPU that plain Rust has no words for: wider vectors, cache lines before
//! they are read, and stores that pass the caches by.
//!
//! A loop has one body, in plain Rust. [`vectorised`] holds it compiled for each [`Level`], and
//! runs the one that the CPU has. Each operation rounds as it is written, whatever vectors the
//! compiler makes of it (Rust fuses no multiplication with an addition), so all levels give the
//! same bits; which NaN an operation on NaNs gives is not promised.

use std::env;
use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use bytemuck::Pod;

/// The instructions that loops are compiled to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Those that every CPU of the architecture has.
    Plain = 1,
    /// Vectors of 32 bytes.
    Avx2 = 2,
    /// Vectors of 64 bytes.
    Avx512 = 3,
}

/// The environment variable that names a level, for tests and measurements.
pub const LEVEL_VARIABLE: &str = "OXIZERO_SIMD";

/// The level in use; 0 before the first question.
static LEVEL: AtomicU8 = AtomicU8::new(0);

/// A name that is none of a level which this CPU has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownLevel {
    /// What [`LEVEL_VARIABLE`] says.
    pub name: String,
}

impl UnknownLevel {
    /// The names of the levels that this CPU has.
    pub fn allowed(&self) -> String {
        let names: Vec<_> = Level::of_cpu().map(Level::name).collect();
        format!("{}, which this CPU has, or leave it unset", names.join(", "))
    }
}

impl fmt::Display for UnknownLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{LEVEL_VARIABLE} = {}`; allowed: {}", self.name, self.allowed())
    }
}

impl Level {
    /// All levels and their names, from the plainest.
    const NAMES: [(Self, &str); 3] =
        [(Self::Plain, "plain"), (Self::Avx2, "avx2"), (Self::Avx512, "avx512")];

    /// The levels that this CPU has, from the plainest.
    pub fn of_cpu() -> impl Iterator<Item = Self> {
        Self::NAMES.into_iter().map(|(level, _)| level).filter(|level| level.is_of_cpu())
    }

    /// What the level is called.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize - 1].1
    }

    /// The level in use: the highest of the CPU, unless the process's environment or
    /// [`select`](Self::select) said otherwise.
    ///
    /// # Panics
    ///
    /// If `OXIZERO_SIMD` is set, and is not the name of a level that this CPU has.
    #[inline]
    pub fn current() -> Self {
        match LEVEL.load(Ordering::Relaxed) {
            1 => Self::Plain,
            2 => Self::Avx2,
            3 => Self::Avx512,
            _ => Self::first(),
        }
    }

    /// Uses this level from now on, in the whole process.
    ///
    /// # Panics
    ///
    /// If this CPU has it not.
    pub fn select(self) {
        assert!(self.is_of_cpu(), "this CPU has no {}", self.name());
        LEVEL.store(self as u8, Ordering::Relaxed);
    }

    /// The level that the process's environment asks for: the highest of the CPU where it says
    /// nothing.
    ///
    /// # Errors
    ///
    /// If `OXIZERO_SIMD` is set, and is not the name of a level that this CPU has.
    pub fn of_environment() -> Result<Self, UnknownLevel> {
        let Some(name) = env::var_os(LEVEL_VARIABLE) else {
            return Ok(Self::of_cpu().last().unwrap_or(Self::Plain));
        };
        let known = Self::of_cpu().find(|level| name == level.name());
        known.ok_or_else(|| UnknownLevel { name: name.to_string_lossy().into_owned() })
    }

    #[cold]
    fn first() -> Self {
        let level = Self::of_environment().unwrap_or_else(|unknown| panic!("{unknown}"));
        level.select();
        level
    }

    #[cfg(target_arch = "x86_64")]
    fn is_of_cpu(self) -> bool {
        match self {
            Self::Plain => true,
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_of_cpu(self) -> bool {
        self == Self::Plain
    }
}

/// Runs `work` as it is compiled for the level in use. Only what is inlined into it profits, so it
/// and what it calls are `#[inline(always)]`.
#[inline]
pub fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    match Level::current() {
        // SAFETY: the level in use is one that the CPU was found to have, by `select`.
        Level::Avx512 => return unsafe { avx512(work) },
        // SAFETY: as above.
        Level::Avx2 => return unsafe { avx2(work) },
        Level::Plain => {}
    }
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// A line of the caches, which move no less.
pub(crate) const LINE: usize = 64;

/// Asks for the lines of `N` elements from `start` on to be brought into the first-level cache.
/// There need not be so many.
#[inline(always)]
pub(crate) fn prefetch<T, const N: usize>(elements: &[T], start: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..N * size_of::<T>()).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let line = elements.as_ptr().wrapping_add(start).wrapping_byte_add(offset);
        // SAFETY: every CPU of the architecture has the instruction, which changes no memory and
        // faults at no address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (elements, start);
}

/// Writes to bytes that nobody reads before all is written.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    target: &'a mut [u8],
    streams: bool,
}

/// Runs `work` with a writer of `target`. Where `streams` says so, what is written goes to memory
/// past the caches, if `target` starts on a line: lines are then not read before they are
/// written, and what lies in the caches stays. It pays where the target is more than a cache
/// holds.
pub(crate) fn written<R>(
    target: &mut [u8],
    streams: bool,
    work: impl FnOnce(Writer<'_>) -> R,
) -> R {
    let streams = streams && target.as_ptr().addr().is_multiple_of(LINE);
    let _ordered = streams.then_some(Ordered);
    // Only the writer reaches the target until the stores are ordered: `target` is borrowed
    // exclusively beyond that.
    work(Writer { target, streams })
}

/// Orders streamed stores before all later ones when dropped, as other stores are by themselves.
struct Ordered;

impl Drop for Ordered {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every CPU of the architecture has the instruction, which touches no memory.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

impl Writer<'_> {
    /// Overwrites `N` elements from `start` on.
    ///
    /// # Panics
    ///
    /// If there are fewer.
    #[inline(always)]
    pub(crate) fn write<T: Pod, const N: usize>(&mut self, start: usize, values: &[T; N]) {
        const { assert!((N * size_of::<T>()).is_multiple_of(LINE), "whole lines are written") };
        let (start, values) = (start * size_of::<T>(), bytemuck::cast_slice(values));
        let target = &mut self.target[start..][..N * size_of::<T>()];
        if self.streams && start.is_multiple_of(LINE) {
            stream(values, target);
        } else {
            target.copy_from_slice(values);
        }
    }

    /// Overwrites the elements from `start` on, as many as there are; at most `values`.
    #[inline(always)]
    pub(crate) fn write_part<T: Pod>(&mut self, start: usize, values: &[T]) {
        let target = &mut self.target[start * size_of::<T>()..];
        target.copy_from_slice(&bytemuck::cast_slice(values)[..target.len()]);
    }
}

/// Copies whole lines past the caches, to a target that starts on one.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn stream(source: &[u8], target: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const PART: usize = size_of::<__m128i>();
    debug_assert!(target.as_ptr().addr().is_multiple_of(PART));
    let (parts, rest) = source.as_chunks::<PART>();
    debug_assert!(rest.is_empty() && source.len() == target.len());
    for (source, target) in parts.iter().zip(target.as_chunks_mut::<PART>().0) {
        // SAFETY: both are in bounds; every CPU of the architecture has the instructions. The
        // target is aligned, since the writer's starts on a line and this part of it on a
        // multiple of a line. `written` orders the stores.
        unsafe {
            let value = _mm_loadu_si128(source.as_ptr().cast());
            _mm_stream_si128(target.as_mut_ptr().cast(), value);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn stream(source: &[u8], target: &mut [u8]) {
    target.copy_from_slice(source);
}
