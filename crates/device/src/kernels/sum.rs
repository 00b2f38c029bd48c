//! Sums, element by element.

use std::ops::Range;

use super::cast::{as_f32, narrow, widen};
use super::divide::all_finite;
use super::{BLOCK, blocks, cast, of_device};
use crate::{View, ViewMut};

/// What becomes of the elements that were in an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// They are overwritten.
    Assign,
    /// The result is added to them.
    Add,
}

/// Puts `source` into `target`: over it, or added to it in f32, rounding once. Returns whether
/// every element of `target` is finite then; on a device, which would have to be asked, `true`.
///
/// # Panics
///
/// If the lengths differ.
pub fn accumulate(source: View<'_>, mut target: ViewMut<'_>, combine: Combine) -> bool {
    let numel = source.numel();
    assert_eq!(numel, target.as_view().numel(), "a source and its target differ in length");
    if let ViewMut::Device(_) = target {
        match combine {
            Combine::Assign => cast(source, target),
            Combine::Add => tree_sum(&[source], target, combine),
        }
        return true;
    }
    let mut finite = true;
    for block in blocks(numel.0) {
        let (source, mut target) = (source.range(block.clone()), target.reborrow().range(block));
        match combine {
            Combine::Assign => cast(source, target.reborrow()),
            Combine::Add => tree_sum(&[source], target.reborrow(), combine),
        }
        finite &= all_finite(target.as_view()); // here, where the block is in the cache
    }
    finite
}

/// Sums the inputs in f32 by a balanced binary tree in their order, and puts the sum into
/// `target`, rounding once; with [`Combine::Add`], after adding it in f32 to what was there.
///
/// The tree over n inputs adds the tree over the first `n.next_power_of_two() / 2` to the tree
/// over the rest, so that four inputs give `(a + b) + (c + d)` and three give `(a + b) + c`.
///
/// # Panics
///
/// If there are no inputs, or lengths differ.
pub fn tree_sum(inputs: &[View<'_>], mut target: ViewMut<'_>, combine: Combine) {
    let numel = target.as_view().numel();
    assert!(!inputs.is_empty(), "a sum of no inputs");
    for (index, input) in inputs.iter().enumerate() {
        assert_eq!(input.numel(), numel, "input {index} of a sum and its target differ in length");
    }
    if let ViewMut::Device(target) = target {
        let inputs: Vec<_> = inputs.iter().map(|input| of_device(*input)).collect();
        return inputs[0].device().tree_sum(&inputs, target, combine);
    }
    let mut sum = [0.0; BLOCK];
    for block in blocks(numel.0) {
        let sum = &mut sum[..block.len()];
        tree(inputs, block.clone(), sum);
        put(sum, target.reborrow().range(block), combine);
    }
}

/// Overwrites `sum` with the tree over the inputs' elements of `block`.
fn tree(inputs: &[View<'_>], block: Range<usize>, sum: &mut [f32]) {
    if let [only] = inputs {
        return widen(only.range(block), sum);
    }
    let (left, right) = inputs.split_at(inputs.len().next_power_of_two() / 2);
    tree(left, block.clone(), sum);
    match right {
        [View::F32(only)] => add(&only[block], sum),
        _ => {
            let mut wide = [0.0; BLOCK];
            let wide = &mut wide[..block.len()];
            tree(right, block, wide);
            add(wide, sum);
        }
    }
}

/// Puts `sum` into `target`, rounding once.
fn put(sum: &mut [f32], target: ViewMut<'_>, combine: Combine) {
    match (target, combine) {
        (ViewMut::F32(target), Combine::Add) => add(sum, target),
        (target, Combine::Add) => {
            let mut wide = [0.0; BLOCK];
            add(as_f32(target.as_view(), &mut wide), sum);
            narrow(sum, target);
        }
        (target, Combine::Assign) => narrow(sum, target),
    }
}

fn add(addend: &[f32], sum: &mut [f32]) {
    for (sum, addend) in sum.iter_mut().zip(addend) {
        *sum += addend;
    }
}
