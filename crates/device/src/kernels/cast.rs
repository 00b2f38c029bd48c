//! From one dtype to another.

use half::{bf16, f16};
use oxizero_core::DType;

use super::element::Element;
use super::row::{self, ROW};
use super::{HANDED_ON, copy, of_device};
use crate::simd::vectorised;
use crate::{Buffer, DeviceView, DeviceViewMut, View, ViewMut};

/// Copies `source` into `target`, rounding to nearest even where the target is narrower. One may
/// lie on a device and the other on the host; then elements that are rounded are so on the host.
///
/// Between equal dtypes the bits are copied. Else a NaN stays a NaN of the same sign, made quiet
/// where it is narrowed; what is too large becomes infinite.
///
/// # Panics
///
/// If the lengths differ.
pub fn cast(source: View<'_>, target: ViewMut<'_>) {
    assert_eq!(source.numel(), target.as_view().numel(), "a cast between different lengths");
    match (source, target) {
        (View::Device(source), target) => cast_from_device(source, target),
        (source, ViewMut::Device(target)) => cast_to_device(source, target),
        (source, target) if source.dtype() == target.as_view().dtype() => {
            copy(source.bytes(), target.bytes_mut());
        }
        (source, target) => convert(source, target),
    }
}

fn convert(source: View<'_>, target: ViewMut<'_>) {
    row::output(target, |output| {
        vectorised(
            #[inline(always)]
            || {
                row::each(
                    source.numel().0,
                    #[inline(always)]
                    |at| {
                        row::ask(source, at);
                        output.put(&row::read(source, at), at);
                    },
                );
            },
        );
    });
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
        ViewMut::Bf16(target) => target.fill(bf16::narrow(value)),
        ViewMut::F16(target) => target.fill(f16::narrow(value)),
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
        ViewMut::F32(target) => match source {
            View::F32(source) => adopt_each(source, target),
            View::Bf16(source) => adopt_each(source, target),
            View::F16(source) => adopt_each(source, target),
            View::Device(_) => unreachable!("{HANDED_ON}"),
        },
        ViewMut::Device(target) if target.as_view().dtype() == DType::F32 => {
            let source = of_device(source);
            source.device().adopt(source, target);
        }
        other => panic!("{} elements adopt others", other.as_view().dtype()),
    }
}

fn adopt_each<T: Element>(source: &[T], target: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            row::each(
                target.len(),
                #[inline(always)]
                |at| {
                    row::ask_of(source, at);
                    row::ask_of(target, at);
                    let given = row::read_of(source, at);
                    let mut kept = row::read_of(target, at);
                    let mut differing = 0;
                    for lane in 0..ROW {
                        let rounded = T::narrow(kept[lane]).widen();
                        let differs = rounded.to_bits() ^ given[lane].to_bits();
                        kept[lane] = if differs == 0 { kept[lane] } else { given[lane] };
                        differing |= differs;
                    }
                    if differing != 0 {
                        row::put(&kept, target, at);
                    }
                },
            );
        },
    );
}
