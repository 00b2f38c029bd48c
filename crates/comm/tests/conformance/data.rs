//! Values to send, and the sums that must come out, by plain loops.

use half::{bf16, f16};
use oxizero_comm::Communicator;
use oxizero_core::{DType, Numel};
use oxizero_device::{Buffer, ViewMut};

/// Numbers of elements a shard: none, one, odd ones, and more than is summed in place at a time.
pub(crate) const SHARDS: [usize; 6] = [0, 1, 5, 17, 64, 9001];

/// Where a buffer lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Heap,
    Alloc,
}

pub(crate) fn buffer(comm: &dyn Communicator, place: Place, numel: usize, dtype: DType) -> Buffer {
    match place {
        Place::Heap => Buffer::heap(Numel(numel), dtype),
        Place::Alloc => Buffer::new(comm.alloc(Numel(numel).bytes(dtype)).unwrap(), dtype),
    }
}

/// A value in f32 whose sums depend on their order: signs and sizes are spread widely.
pub(crate) fn value(rank: usize, index: usize, seed: usize) -> f32 {
    let mixed = (rank * 1_000_003 + index * 31 + seed * 7919 + 1).wrapping_mul(0x9E37_79B9);
    let mantissa = 1.0 + (mixed % 1021) as f32 / 1021.0;
    let sign = if mixed & 4096 == 0 { 1.0 } else { -1.0 };
    sign * mantissa * 2.0_f32.powi((mixed >> 13) as i32 % 12)
}

/// The value that is left of `value` once it was stored as `dtype`.
pub(crate) fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
    }
}

pub(crate) fn fill(
    buffer: &mut Buffer,
    range: std::ops::Range<usize>,
    value: impl Fn(usize) -> f32,
) {
    let indices = range.clone();
    match buffer.range_mut(range) {
        ViewMut::F32(all) => all.iter_mut().zip(indices).for_each(|(x, i)| *x = value(i)),
        ViewMut::Bf16(all) => {
            all.iter_mut().zip(indices).for_each(|(x, i)| *x = bf16::from_f32(value(i)));
        }
        ViewMut::F16(all) => {
            all.iter_mut().zip(indices).for_each(|(x, i)| *x = f16::from_f32(value(i)));
        }
        ViewMut::Device(_) => unreachable!("these back ends are the host's"),
    }
}

pub(crate) fn values(buffer: &Buffer) -> Vec<f32> {
    match buffer.view() {
        oxizero_device::View::F32(all) => all.to_vec(),
        oxizero_device::View::Bf16(all) => all.iter().map(|x| x.to_f32()).collect(),
        oxizero_device::View::F16(all) => all.iter().map(|x| x.to_f32()).collect(),
        oxizero_device::View::Device(_) => unreachable!("these back ends are the host's"),
    }
}

/// The sum over ranks as promised: neighbours first, `(a + b) + (c + d)`, the last one alone
/// where there is no neighbour.
pub(crate) fn tree(mut terms: Vec<f32>) -> f32 {
    while terms.len() > 1 {
        terms = terms
            .chunks(2)
            .map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap())
            .collect();
    }
    terms[0]
}
