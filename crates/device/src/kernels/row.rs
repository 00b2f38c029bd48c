//! Rows: the elements that a kernel works on at once.
//!
//! A kernel is a loop over rows within [`vectorised`](crate::simd::vectorised), and all that it
//! does to a row is inlined there. Arithmetic is on arrays of f32, which the compiler holds in
//! registers. The last row is filled up with zeros, of which nothing is written. While a row is
//! worked on, one further on is asked for.

use half::{bf16, f16};
use oxizero_core::DType;

use super::HANDED_ON;
use super::element::Element;
use crate::simd::{Writer, prefetch, written};
use crate::{View, ViewMut};

/// The elements of a row: four lines of f32 in the caches.
pub const ROW: usize = 64;

/// A row, in f32.
pub type Row = [f32; ROW];

/// How many elements further on the row is that is asked for.
const AHEAD: usize = 8 * ROW;

/// Outputs of so many bytes are written past the caches.
const STREAMED_FROM: usize = 1 << 20;

/// Why a whole row is read or written as such.
const WHOLE: &str = "all operands of a kernel are as long";

/// Where a row is.
#[derive(Clone, Copy, Debug)]
pub struct At {
    /// Its first element.
    start: usize,
    /// Whether it has all its elements; so where it is worked on, this is known to the compiler.
    whole: bool,
}

/// Calls `work` with the rows of `0..numel`, in order.
#[inline(always)]
pub fn each(numel: usize, mut work: impl FnMut(At)) {
    let whole = numel - numel % ROW;
    for start in (0..whole).step_by(ROW) {
        work(At { start, whole: true });
    }
    if whole < numel {
        work(At { start: whole, whole: false });
    }
}

/// Asks for the elements that will be read or changed a few rows after the one from `start` on.
#[inline(always)]
pub fn ask(values: View<'_>, at: At) {
    match values {
        View::F32(values) => ask_of(values, at),
        View::Bf16(values) => ask_of(values, at),
        View::F16(values) => ask_of(values, at),
        View::Device(_) => {}
    }
}

/// [`ask`], where the dtype is known.
#[inline(always)]
pub fn ask_of<T>(values: &[T], at: At) {
    prefetch::<T, ROW>(values, at.start + AHEAD);
}

/// The elements from `start` on; exact.
///
/// # Panics
///
/// If they lie on a device.
#[inline(always)]
pub fn read(values: View<'_>, at: At) -> Row {
    match values {
        View::F32(values) => read_of(values, at),
        View::Bf16(values) => read_of(values, at),
        View::F16(values) => read_of(values, at),
        View::Device(_) => unreachable!("{HANDED_ON}"),
    }
}

/// [`read`], where the dtype is known.
#[inline(always)]
pub fn read_of<T: Element>(values: &[T], at: At) -> Row {
    let values = &values[at.start..];
    match at.whole {
        true => wide(values.first_chunk().expect(WHOLE)),
        false => wide(&filled_up(values)),
    }
}

#[inline(always)]
fn wide<T: Element>(values: &[T; ROW]) -> Row {
    let mut row = [0.0; ROW];
    for lane in 0..ROW {
        row[lane] = values[lane].widen();
    }
    row
}

#[inline(always)]
fn filled_up<T: Element>(values: &[T]) -> [T; ROW] {
    let mut row = [T::zeroed(); ROW];
    row[..values.len()].copy_from_slice(values);
    row
}

/// Overwrites the elements from `start` on, rounding to nearest even. Returns whether all are
/// finite then.
#[inline(always)]
pub fn put<T: Element>(row: &Row, values: &mut [T], at: At) -> bool {
    let (row, values) = (narrow(row), &mut values[at.start..]);
    match at.whole {
        true => *values.first_chunk_mut().expect(WHOLE) = row,
        false => values.copy_from_slice(&row[..values.len()]),
    }
    all_finite(&row)
}

#[inline(always)]
fn narrow<T: Element>(row: &Row) -> [T; ROW] {
    let mut narrow = [T::zeroed(); ROW];
    for lane in 0..ROW {
        narrow[lane] = T::narrow(row[lane]);
    }
    narrow
}

#[inline(always)]
fn all_finite<T: Element>(row: &[T; ROW]) -> bool {
    let mut finite = true;
    for value in row {
        finite &= value.is_finite();
    }
    finite
}

/// Elements that are overwritten row by row, and not read before all of them are.
#[derive(Debug)]
pub struct Output<'a> {
    writer: Writer<'a>,
    dtype: DType,
}

/// Runs `work` with the output that `target` is. What is more than a second-level cache holds is
/// written past the caches.
///
/// # Panics
///
/// If it lies on a device.
pub fn output<R>(target: ViewMut<'_>, work: impl FnOnce(&mut Output<'_>) -> R) -> R {
    let dtype = target.as_view().dtype();
    let bytes = target.bytes_mut();
    let streams = bytes.len() >= STREAMED_FROM;
    written(bytes, streams, |writer| work(&mut Output { writer, dtype }))
}

impl Output<'_> {
    /// Overwrites the elements from `start` on, as [`put`] does.
    #[inline(always)]
    pub fn put(&mut self, row: &Row, at: At) -> bool {
        match self.dtype {
            DType::F32 => self.put_of::<f32>(row, at),
            DType::Bf16 => self.put_of::<bf16>(row, at),
            DType::F16 => self.put_of::<f16>(row, at),
        }
    }

    #[inline(always)]
    fn put_of<T: Element>(&mut self, row: &Row, at: At) -> bool {
        self.write(&narrow::<T>(row), at)
    }

    /// Overwrites the elements from `start` on by those of `values`, of the same dtype. Returns
    /// whether all are finite.
    #[inline(always)]
    pub fn copy<T: Element>(&mut self, values: &[T], at: At) -> bool {
        let values = &values[at.start..];
        match at.whole {
            true => self.write(values.first_chunk().expect(WHOLE), at),
            false => self.write(&filled_up(values), at),
        }
    }

    #[inline(always)]
    fn write<T: Element>(&mut self, row: &[T; ROW], at: At) -> bool {
        match at.whole {
            true => self.writer.write(at.start, row),
            false => self.writer.write_part(at.start, row),
        }
        all_finite(row)
    }
}
