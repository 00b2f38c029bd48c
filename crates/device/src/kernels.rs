//! Host kernels in plain Rust, written so that the compiler vectorises them.
//!
//! Arithmetic is in f32 (squares add in f64) and rounds once, to nearest even, on the way into
//! storage. A kernel never looks at more than the elements it is given, so that padding between
//! parameters is never read.

use oxizero_core::DType;

use crate::{View, ViewMut};

/// What becomes of the elements that were in an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// They are overwritten.
    Assign,
    /// The result is added to them.
    Add,
}

/// Copies `source` into `target`, rounding to nearest even where the target is narrower.
///
/// # Panics
///
/// If the lengths differ.
pub fn cast(source: View<'_>, target: ViewMut<'_>) {
    let _ = (source, target);
    todo!()
}

/// Puts `source` into `target`: over it, or added to it.
///
/// # Panics
///
/// If the lengths differ.
pub fn accumulate(source: View<'_>, target: ViewMut<'_>, combine: Combine) {
    let _ = (source, target, combine);
    todo!()
}

/// Sums the inputs in f32 by a balanced binary tree in their order, and puts the sum into
/// `target`, rounding once.
///
/// The tree over n inputs adds the tree over the first `n.next_power_of_two() / 2` to the tree
/// over the rest, so that four inputs give `(a + b) + (c + d)` and three give `(a + b) + c`.
///
/// # Panics
///
/// If there are no inputs, or lengths differ.
pub fn tree_sum(inputs: &[View<'_>], target: ViewMut<'_>, combine: Combine) {
    let _ = (inputs, target, combine);
    todo!()
}

/// What one pass over a gradient found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Squares {
    /// The sum of the squares of the divided elements, in f64, in their order.
    pub sum: f64,
    /// Whether every divided element is finite.
    pub finite: bool,
}

/// Divides each element by `divisor` in registers, and returns the squares of the quotients.
pub fn divided_squares(grad: View<'_>, divisor: f32) -> Squares {
    let _ = (grad, divisor);
    todo!()
}

/// Divides each element by `divisor` where it lies, rounding once to `grad`'s dtype.
pub fn divide(grad: ViewMut<'_>, divisor: f32) {
    let _ = (grad, divisor);
    todo!()
}

/// Whether an element of `dtype` can hold every value of `narrow`.
pub fn holds(dtype: DType, narrow: DType) -> bool {
    dtype == narrow || dtype == DType::F32
}
