//! From one dtype to another.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use oxizero_core::{DType, Numel};

use super::{BLOCK, HANDED_ON, blocks, of_device};
use crate::{Buffer, DeviceView, DeviceViewMut, View, ViewMut};

/// Copies `source` into `target`, rounding to nearest even where the target is narrower. One may
/// lie on a device and the other on the host; then elements that are rounded are so on the host.
///
/// Between equal dtypes the bits are copied. Else a NaN stays a NaN of the same sign, made quiet;
/// what is too large becomes infinite.
///
/// # Panics
///
/// If the lengths differ.
pub fn cast(source: View<'_>, target: ViewMut<'_>) {
    assert_eq!(source.numel(), target.as_view().numel(), "a cast between different lengths");
    match (source, target) {
        (View::Device(source), target) => cast_from_device(source, target),
        (source, ViewMut::Device(target)) => cast_to_device(source, target),
        (View::F32(source), ViewMut::F32(target)) => target.copy_from_slice(source),
        (View::Bf16(source), ViewMut::Bf16(target)) => target.copy_from_slice(source),
        (View::F16(source), ViewMut::F16(target)) => target.copy_from_slice(source),
        (source, ViewMut::F32(target)) => widen(source, target),
        (View::F32(source), target) => narrow(source, target),
        (source, mut target) => {
            let mut wide = [0.0; BLOCK];
            for block in blocks(source.numel().0) {
                let wide = &mut wide[..block.len()];
                widen(source.range(block.clone()), wide);
                narrow(wide, target.reborrow().range(block));
            }
        }
    }
}

fn cast_from_device(source: DeviceView<'_>, target: ViewMut<'_>) {
    let device = source.device();
    match target {
        ViewMut::Device(target) => device.cast(source, target),
        target if target.as_view().dtype() == source.dtype() => device.read(source, target),
        target => {
            let mut read = Buffer::heap(source.numel(), source.dtype());
            device.read(source, read.view_mut());
            cast(read.view(), target);
        }
    }
}

fn cast_to_device(source: View<'_>, target: DeviceViewMut<'_>) {
    let (device, dtype) = (target.device(), target.as_view().dtype());
    if source.dtype() == dtype {
        return device.write(source, target);
    }
    let mut rounded = Buffer::heap(source.numel(), dtype);
    cast(source, rounded.view_mut());
    device.write(rounded.view(), target);
}

/// Overwrites the elements with `value`, rounded to nearest even.
pub fn fill(target: ViewMut<'_>, value: f32) {
    match target {
        ViewMut::F32(target) => target.fill(value),
        ViewMut::Bf16(target) => target.fill(bf16::from_f32(value)),
        ViewMut::F16(target) => target.fill(f16::from_f32(value)),
        ViewMut::Device(target) => target.device().fill(target, value),
    }
}

/// Copies those elements of `source` into `target` that the target's would not be rounded to: what
/// somebody else wrote beside an f32 copy. The others keep their precision.
///
/// # Panics
///
/// If the lengths differ, or the target is not f32.
pub fn adopt(source: View<'_>, target: ViewMut<'_>) {
    assert_eq!(source.numel(), target.as_view().numel(), "adopted elements of another length");
    match target {
        ViewMut::F32(target) => adopt_on_host(source, target),
        ViewMut::Device(target) if target.as_view().dtype() == DType::F32 => {
            let source = of_device(source);
            source.device().adopt(source, target);
        }
        other => panic!("{} elements adopt others", other.as_view().dtype()),
    }
}

fn adopt_on_host(source: View<'_>, target: &mut [f32]) {
    let mut rounded = Buffer::heap(Numel(BLOCK.min(target.len())), source.dtype());
    let mut scratch = [[0.0; BLOCK]; 2];
    for block in blocks(target.len()) {
        let (source, target) = (source.range(block.clone()), &mut target[block]);
        if rounds_to(target, source) {
            continue;
        }
        let len = target.len();
        cast(View::F32(target), rounded.range_mut(0..len));
        let [given, kept] = &mut scratch;
        let (given, kept) = (as_f32(source, given), as_f32(rounded.range(0..len), kept));
        for ((target, given), kept) in target.iter_mut().zip(given).zip(kept) {
            if given.to_bits() != kept.to_bits() {
                *target = *given;
            }
        }
    }
}

/// Whether every element of `source`, rounded to nearest even, is the one of `target`, to the bit;
/// false if one is NaN. At most a block of as many elements.
fn rounds_to(source: &[f32], target: View<'_>) -> bool {
    match target {
        View::F32(target) => {
            let pairs = source.iter().zip(target);
            pairs.fold(0, |bits, (one, other)| bits | (one.to_bits() ^ other.to_bits())) == 0
        }
        View::Bf16(target) => {
            // As `f32_to_bf16` rounds what is no NaN, without a step to 16 bits.
            let differing = |one: &f32, other: &bf16| {
                let bits = one.to_bits();
                let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
                rounded ^ u32::from(other.to_bits()) << 16
            };
            let pairs = source.iter().zip(target);
            pairs.fold(0, |bits, (one, other)| bits | differing(one, other)) >> 16 == 0
        }
        View::F16(target) => {
            let mut rounded = [f16::ZERO; BLOCK];
            let rounded = &mut rounded[..source.len()];
            rounded.convert_from_f32_slice(source);
            let pairs = rounded.iter().zip(target);
            pairs.fold(0, |bits, (one, other)| bits | (one.to_bits() ^ other.to_bits())) == 0
        }
        View::Device(_) => unreachable!("{HANDED_ON}"),
    }
}

/// The elements as f32: where they lie, or widened into the front of `scratch`.
pub(super) fn as_f32<'a>(source: View<'a>, scratch: &'a mut [f32]) -> &'a [f32] {
    if let View::F32(values) = source {
        return values;
    }
    let wide = &mut scratch[..source.numel().0];
    widen(source, wide);
    wide
}

/// Writes the elements as f32; exact.
pub(super) fn widen(source: View<'_>, target: &mut [f32]) {
    match source {
        View::F32(source) => target.copy_from_slice(source),
        View::Bf16(source) => {
            for (target, source) in target.iter_mut().zip(source) {
                *target = bf16_to_f32(*source);
            }
        }
        View::F16(source) => source.convert_to_f32_slice(target),
        View::Device(_) => unreachable!("{HANDED_ON}"),
    }
}

/// Rounds to nearest even into the target's dtype.
pub(super) fn narrow(source: &[f32], target: ViewMut<'_>) {
    match target {
        ViewMut::F32(target) => target.copy_from_slice(source),
        ViewMut::Bf16(target) => {
            for (target, source) in target.iter_mut().zip(source) {
                *target = f32_to_bf16(*source);
            }
        }
        ViewMut::F16(target) => target.convert_from_f32_slice(source),
        ViewMut::Device(_) => unreachable!("{HANDED_ON}"),
    }
}

/// Equals [`bf16::to_f32`], with a select in place of its branch, so that loops vectorise.
fn bf16_to_f32(value: bf16) -> f32 {
    let bits = u32::from(value.to_bits()) << 16;
    let quiet = if bits & 0x7FFF_FFFF > 0x7F80_0000 { 0x0040_0000 } else { 0 };
    f32::from_bits(bits | quiet)
}

/// Equals [`bf16::from_f32`], with a select in place of its branches, so that loops vectorise.
fn f32_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    // Half a unit in the last place, less one where the kept part is even: ties go to even.
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1));
    let quiet = bits | 0x0040_0000;
    let is_nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    bf16::from_bits(((if is_nan { quiet } else { rounded }) >> 16) as u16)
}
