//! Kernels: the host's, in plain Rust, written so that the compiler vectorises them; elements on a
//! device are handed to that.
//!
//! Arithmetic is in f32 (squares add in f64) and rounds once, to nearest even, on the way into
//! storage. Elements of 16 bits are widened a block at a time, on the stack. A kernel never looks
//! at more than the elements it is given, so that padding between parameters is never read.

mod cast;
mod divide;
mod sum;

pub use cast::{adopt, cast, fill};
pub use divide::{
    Measure, Measured, Power, Powers, divide, divided_largest, divided_powers, divided_squares,
    measure,
};
pub use sum::{Combine, accumulate, tree_sum};

use std::ops::Range;

use oxizero_core::DType;

use crate::{DeviceView, View};

/// Elements that are widened at once. A few blocks of f32 fit in a core's first-level cache.
const BLOCK: usize = 512;

/// Whether an element of `dtype` can hold every value of `narrow`.
pub fn holds(dtype: DType, narrow: DType) -> bool {
    dtype == narrow || dtype == DType::F32
}

/// The ranges of at most [`BLOCK`] elements that tile `0..numel`, in order.
fn blocks(numel: usize) -> impl Iterator<Item = Range<usize>> {
    (0..numel).step_by(BLOCK).map(move |start| start..numel.min(start + BLOCK))
}

/// Why the host's loops meet no elements on a device.
const HANDED_ON: &str = "a kernel hands a device's elements on";

/// The elements of an operand whose other operands lie on a device.
///
/// # Panics
///
/// If they lie on the host: only casts move elements between the two.
fn of_device(view: View<'_>) -> DeviceView<'_> {
    match view {
        View::Device(view) => view,
        view => panic!("{} elements of the host in a device's kernel", view.numel()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_holds_everything_and_the_narrow_dtypes_only_themselves() {
        for dtype in DType::ALL {
            assert!(holds(DType::F32, dtype) && holds(dtype, dtype));
        }
        assert!(!holds(DType::Bf16, DType::F16) && !holds(DType::F16, DType::Bf16));
        assert!(!holds(DType::Bf16, DType::F32) && !holds(DType::F16, DType::F32));
    }

    #[test]
    fn blocks_tile_the_elements() {
        for numel in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK] {
            let mut end = 0;
            for block in blocks(numel) {
                assert_eq!(block.start, end);
                assert!(!block.is_empty() && block.len() <= BLOCK);
                end = block.end;
            }
            assert_eq!(end, numel);
        }
    }
}
