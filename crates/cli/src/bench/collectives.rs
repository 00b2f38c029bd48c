//! `oxizero bench collectives`: what moves tensors between ranks, beside plain copies.
//!
//! A size is the bytes of the whole tensor in the dtype that travels, rounded down so that all
//! ranks have equal parts of whole cache lines. The references:
//!
//! - `memcpy`: every rank copies so many bytes, from memory of its own to memory of its own, at the
//!   same time. All of that memory is in use before.
//! - `stream_add`: every rank sums two arrays of its own into a third. It reads and writes as many
//!   bytes as a rank does in the reduce-scatter of f32: of W ranks, it reads the tensor once and
//!   writes a W-th of it.
//!
//! `reduce_scatter/bf16` sums into f32, as gradients do, and `reduce_scatter_add` adds that to what
//! is there. `all_gather` reads the others' parts into memory of the rank's own.

use std::hint::black_box;

use clap::Args;
use oxizero_comm::{CommError, Communicator, ReduceScatter, ReduceTarget};
use oxizero_core::config::Launch;
use oxizero_core::{Bytes, DType, Numel, Rank, WorldSize};
use oxizero_device::kernels::{self, Combine};
use oxizero_device::{Buffer, View, ViewMut};
use serde::{Deserialize, Serialize};

use super::clock::{Clock, Lap};
use super::rows::Row;
use super::{Benchmark, hash, latency, pattern, room};
use crate::error::CliError;
use crate::rank::RankError;

/// What is moved.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct Collectives {
    /// Bytes of the whole tensor, such as 256MiB; several by commas.
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "16MiB,256MiB",
        value_delimiter = ',',
        value_parser = size
    )]
    sizes: Vec<Bytes>,
}

/// Times a tensor's size that a rank holds at most: two contributions, sums of both, one more to
/// add to, the part and the whole that are gathered, what is copied from and to, and what is added.
const TENSORS_A_RANK: usize = 10;

impl Benchmark for Collectives {
    fn title(&self) -> String {
        let sizes: Vec<_> = self.sizes.iter().map(|size| label(*size)).collect();
        format!("collectives of {}", sizes.join(", "))
    }

    fn check_before(&self, world_size: WorldSize, _: Launch) -> Result<Bytes, CliError> {
        let largest = self.largest();
        room::check("sizes", &label(largest), largest * (TENSORS_A_RANK * world_size.get()))
    }

    fn run(&self, rounds: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError> {
        let mut rows = Vec::new();
        for size in &self.sizes {
            rows.extend(measure(*size, rounds, comm)?);
        }
        rows.extend(latency::measure(self.largest(), rounds, comm)?);
        Ok(rows)
    }
}

impl Collectives {
    fn largest(&self) -> Bytes {
        self.sizes.iter().copied().max().unwrap_or_default()
    }
}

/// One size, everything in turn in every round.
fn measure(size: Bytes, rounds: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError> {
    let mut tensors = Tensors::new(size, comm)?;
    let mut clock = Clock::default();
    for _ in 0..rounds {
        tensors.time(&mut clock)?;
    }
    let hashes = tensors.hashes()?;
    let mut rows = clock.rows(comm.world_size().get());
    for row in &mut rows {
        let hash = hashes.iter().find(|(what, _)| tensors.name(what) == row.name);
        row.hash = hash.map(|(_, hash)| hash.clone());
    }
    let sum = rows.iter().find(|row| row.name == tensors.name(SUM));
    let sum = sum.expect("it is timed in every round").over(&tensors.name(STREAM_ADD), &rows);
    rows.push(sum);
    Ok(rows)
}

const MEMCPY: &str = "memcpy";
const STREAM_ADD: &str = "stream_add";
const SUM: &str = "reduce_scatter/f32";
const SUM_NARROW: &str = "reduce_scatter/bf16";
const SUM_ADD: &str = "reduce_scatter_add/bf16";
const SUM_ALL: &str = "all_reduce/f32";
const GATHER: &str = "all_gather/f32";

/// What one rank has of one size.
struct Tensors<'a> {
    comm: &'a dyn Communicator,
    label: String,
    /// This rank's numbers, and memory to copy them to; nobody else reads them.
    source: Vec<f32>,
    copied: Vec<f32>,
    added: Vec<f32>,
    wide: Summed,
    narrow: Summed,
    /// The narrow sum, to which the same sum is added.
    doubled: Buffer,
    part: Buffer,
    whole: Buffer,
}

/// A contribution, and the sum of this rank's part.
struct Summed {
    partial: Buffer,
    sum: Buffer,
}

impl<'a> Tensors<'a> {
    fn new(size: Bytes, comm: &'a dyn Communicator) -> Result<Self, CommError> {
        let ranks = comm.world_size().get();
        let part = size.0 / ranks / LINE * LINE;
        let numel = ranks * part / size_of::<f32>();
        let alloc = |numel: usize, dtype| {
            Ok::<_, CommError>(Buffer::new(comm.alloc(Numel(numel).bytes(dtype))?, dtype))
        };
        let mut source = vec![0.0; numel];
        fill(ViewMut::F32(&mut source), 0, comm.rank());
        let summed = |numel: usize, dtype| {
            let (mut partial, sum) = (alloc(numel, dtype)?, alloc(numel / ranks, DType::F32)?);
            fill(partial.view_mut(), 0, comm.rank());
            Ok::<_, CommError>(Summed { partial, sum })
        };
        let mut own = alloc(numel / ranks, DType::F32)?;
        fill(own.view_mut(), comm.rank().0 * numel / ranks, comm.rank());
        // Three arrays of so many elements are a tensor and a part.
        let added = numel * (ranks + 1) / ranks / 3;
        Ok(Self {
            comm,
            label: label(size),
            copied: vec![1.0; numel],
            added: vec![1.0; added],
            source,
            wide: summed(numel, DType::F32)?,
            narrow: summed(2 * numel, DType::Bf16)?,
            doubled: alloc(2 * numel / ranks, DType::F32)?,
            part: own,
            whole: Buffer::mapped(Numel(numel), DType::F32),
        })
    }

    fn name(&self, what: &str) -> String {
        format!("{what}/{}", self.label)
    }

    /// Everything once.
    fn time(&mut self, clock: &mut Clock) -> Result<(), RankError> {
        // The last round's all-reduce has left its sums there.
        kernels::cast(View::F32(&self.source), self.wide.partial.view_mut());
        self.copy(clock)?;
        self.add(clock)?;
        let (wide, narrow) = (self.wide.take(), self.narrow.take());
        self.wide = self.sum(SUM, wide, Combine::Assign, clock)?;
        self.narrow = self.sum(SUM_NARROW, narrow, Combine::Assign, clock)?;
        // Doubled is what it must be: the sum that is there, and the same once more.
        kernels::cast(self.narrow.sum.view(), self.doubled.view_mut());
        let narrow = Summed { partial: self.narrow.partial.take(), sum: self.doubled.take() };
        let narrow = self.sum(SUM_ADD, narrow, Combine::Add, clock)?;
        (self.narrow.partial, self.doubled) = (narrow.partial, narrow.sum);
        self.gather(clock)?;
        self.sum_all(clock)
    }

    fn copy(&mut self, clock: &mut Clock) -> Result<(), RankError> {
        let lap = Lap::start(self.comm)?;
        self.copied.copy_from_slice(black_box(&self.source));
        self.stop(clock, lap, MEMCPY)?;
        black_box(&mut self.copied);
        Ok(())
    }

    fn add(&mut self, clock: &mut Clock) -> Result<(), RankError> {
        let numel = self.added.len();
        let sources = [&self.source, &self.copied].map(|source| View::F32(&source[..numel]));
        let lap = Lap::start(self.comm)?;
        kernels::tree_sum(black_box(&sources), ViewMut::F32(&mut self.added), Combine::Assign);
        self.stop(clock, lap, STREAM_ADD)?;
        black_box(&mut self.added);
        Ok(())
    }

    fn sum(
        &self,
        what: &str,
        Summed { partial, sum }: Summed,
        combine: Combine,
        clock: &mut Clock,
    ) -> Result<Summed, RankError> {
        let op = ReduceScatter { partial, target: ReduceTarget::Shard(sum, combine) };
        let lap = Lap::start(self.comm)?;
        let op = self.comm.reduce_scatter(op)?.wait()?;
        self.stop(clock, lap, what)?;
        let ReduceScatter { partial, target: ReduceTarget::Shard(sum, _) } = op else {
            unreachable!("a reduce-scatter returns its operands");
        };
        Ok(Summed { partial, sum })
    }

    fn gather(&mut self, clock: &mut Clock) -> Result<(), RankError> {
        let (part, whole) = (self.part.take(), self.whole.take());
        let lap = Lap::start(self.comm)?;
        (self.part, self.whole) = self.comm.all_gather_into(part, whole)?.wait()?;
        self.stop(clock, lap, GATHER)
    }

    fn sum_all(&mut self, clock: &mut Clock) -> Result<(), RankError> {
        let partial = self.wide.partial.take();
        let lap = Lap::start(self.comm)?;
        self.wide.partial = self.comm.all_reduce(partial)?.wait()?;
        self.stop(clock, lap, SUM_ALL)
    }

    fn stop(&self, clock: &mut Clock, lap: Lap, what: &str) -> Result<(), RankError> {
        clock.stop(lap, &self.name(what), &self.name(MEMCPY), self.comm)?;
        Ok(())
    }

    /// By what was done last: the hash of what came of it, of all ranks' parts in rank order. All
    /// of it is compared with what it must be.
    fn hashes(&self) -> Result<[(&'static str, String); 5], RankError> {
        let (ranks, rank) = (self.comm.world_size().get(), self.comm.rank());
        let total = |index| (ranks * (index % PERIOD) + ranks * (ranks - 1) / 2) as f32;
        let part = |what, sum: &Buffer, times: f32| {
            let first = rank.0 * sum.numel().0;
            check(what, sum.f32(), first, |index| times * total(index))?;
            Ok::<_, RankError>((what, hash::joined(&hash::of([sum.view().bytes()]), self.comm)?))
        };
        let whole = |what, values: &Buffer, expected: &dyn Fn(usize) -> f32| {
            check(what, values.f32(), 0, expected)?;
            let hash = hash::same(&hash::of([values.view().bytes()]), what, self.comm)?;
            Ok::<_, RankError>((what, hash))
        };
        let numel = self.whole.numel().0;
        let gathered = |index| given(index, Rank(index / (numel / ranks)));
        Ok([
            part(SUM, &self.wide.sum, 1.0)?,
            part(SUM_NARROW, &self.narrow.sum, 1.0)?,
            part(SUM_ADD, &self.doubled, 2.0)?,
            whole(SUM_ALL, &self.wide.partial, &total)?,
            whole(GATHER, &self.whole, &gathered)?,
        ])
    }
}

impl Summed {
    fn take(&mut self) -> Self {
        Self { partial: self.partial.take(), sum: self.sum.take() }
    }
}

/// A part is a multiple of so many bytes: whole cache lines, and whole elements of every dtype.
const LINE: usize = 64;

/// The elements of a tensor repeat after so many, which no power of two is a multiple of.
pub(super) const PERIOD: usize = 61;

/// Element `index` of what a rank gives: a whole number that bf16 holds, with 64 ranks too.
pub(super) fn given(index: usize, rank: Rank) -> f32 {
    (index % PERIOD + rank.0) as f32
}

/// Writes what a rank gives, from element `first` on.
pub(super) fn fill(target: ViewMut<'_>, first: usize, rank: Rank) {
    pattern::fill(target, first, PERIOD, |index| given(index, rank));
}

/// Refuses elements of a tensor, from element `first` on, that are not what they must be.
pub(super) fn check(
    what: &str,
    values: &[f32],
    first: usize,
    expected: impl Fn(usize) -> f32,
) -> Result<(), RankError> {
    let wrong = values.iter().zip(first..).find(|(value, index)| **value != expected(*index));
    wrong.map_or(Ok(()), |(value, index)| {
        let expected = expected(index);
        Err(RankError::Contents(format!("{what}: element {index} is {value}, not {expected}")))
    })
}

const UNITS: [(&str, usize); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// A size as the command line has it.
pub(super) fn label(size: Bytes) -> String {
    match UNITS.iter().find(|(_, bytes)| size.0.is_multiple_of(*bytes)) {
        Some((unit, bytes)) => format!("{}{unit}", size.0 / bytes),
        None => size.0.to_string(),
    }
}

/// A part of 64 ranks has a cache line, and no computer has the memory for more.
const SIZES: std::ops::RangeInclusive<usize> = 4 << 10..=1 << 40;

fn size(text: &str) -> Result<Bytes, String> {
    let unit = UNITS.iter().find_map(|(unit, bytes)| Some((text.strip_suffix(unit)?, *bytes)));
    let (number, unit) = unit.unwrap_or((text, 1));
    let bytes = number.parse().ok().and_then(|number: usize| number.checked_mul(unit));
    let possible = bytes.filter(|bytes| SIZES.contains(bytes)).map(Bytes);
    possible.ok_or_else(|| "allowed: 4KiB to 1024GiB, as bytes, KiB, MiB or GiB".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in [("4096", 4096), ("4KiB", 4096), ("3MiB", 3 << 20), ("1GiB", 1 << 30)]
        {
            assert_eq!(size(text), Ok(Bytes(bytes)));
            assert_eq!(size(&label(Bytes(bytes))), Ok(Bytes(bytes)));
        }
        assert_eq!([5000, 1 << 12].map(|bytes| label(Bytes(bytes))), ["5000", "4KiB"]);
        for text in ["", "MiB", "4095", "-1", "1025GiB", "1.5GiB", "99999999999999999999", "1TiB"] {
            size(text).unwrap_err();
        }
    }

    #[test]
    fn what_ranks_give_is_exact_in_bf16_and_differs_from_element_to_element() {
        let mut narrow = Buffer::heap(Numel(10_000), DType::Bf16);
        let mut wide = vec![0.0; 10_000];
        fill(narrow.view_mut(), 7, Rank(63));
        kernels::cast(narrow.view(), ViewMut::F32(&mut wide));
        check("a", &wide, 7, |index| (index % 61 + 63) as f32).unwrap();
        wide[9_999] += 1.0;
        let error = check("a", &wide, 7, |index| given(index, Rank(63))).unwrap_err();
        assert_eq!(error.to_string(), "a: element 10006 is 66, not 65");
    }
}
