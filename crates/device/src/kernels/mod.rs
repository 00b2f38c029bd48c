//! Kernels: the host's, in plain Rust, written so that the compiler vectorises them; elements on a
//! device are handed to that.
//!
//! Arithmetic is in f32 (powers add in f64) and rounds once, to nearest even, on the way into
//! storage; the bits are the same at every [`Level`](crate::simd::Level). A NaN stays one, and a
//! cast keeps what fits of its bits; which NaN a sum of them is, is not promised. A kernel never
//! looks at more than the elements it is given, so that padding between parameters is never read.

mod cast;
mod checksum;
mod copy;
mod divide;
mod element;
pub mod row;
mod sum;

pub use cast::{adopt, cast, fill};
pub use checksum::checksums;
pub use copy::copy;
pub use divide::{
    Measure, Measured, Power, Powers, divide, divided_largest, divided_powers, divided_squares,
    exact_reciprocal, measure, measure_with, quotients,
};
pub use element::Element;
pub use sum::{Combine, accumulate, tree_sum, tree_sum_in_place};

use oxizero_core::DType;

use crate::{DeviceView, View};

/// Whether an element of `dtype` can hold every value of `narrow`.
pub fn holds(dtype: DType, narrow: DType) -> bool {
    dtype == narrow || dtype == DType::F32
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
}
