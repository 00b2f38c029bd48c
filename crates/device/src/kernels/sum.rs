//! Sums, element by element.

use super::element::Element;
use super::row::{self, At, ROW, Row};
use super::{HANDED_ON, cast, of_device};
use crate::simd::vectorised;
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
/// What is put over elements of its own dtype are the same bits.
///
/// # Panics
///
/// If the lengths differ.
pub fn accumulate(source: View<'_>, target: ViewMut<'_>, combine: Combine) -> bool {
    let numel = source.numel();
    assert_eq!(numel, target.as_view().numel(), "a source and its target differ in length");
    match (target, combine) {
        (target @ ViewMut::Device(_), Combine::Assign) => {
            cast(source, target);
            true
        }
        (target @ ViewMut::Device(_), Combine::Add) => {
            tree_sum(&[source], target, combine);
            true
        }
        (target, Combine::Assign) if target.as_view().dtype() == source.dtype() => match source {
            View::F32(source) => copy(source, target),
            View::Bf16(source) => copy(source, target),
            View::F16(source) => copy(source, target),
            View::Device(_) => unreachable!("{HANDED_ON}"),
        },
        (target, Combine::Assign) => overwrite(
            target,
            &[source],
            #[inline(always)]
            |at| row::read(source, at),
        ),
        (target, Combine::Add) => add(
            target,
            &[source],
            #[inline(always)]
            |at| row::read(source, at),
        ),
    }
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
pub fn tree_sum(inputs: &[View<'_>], target: ViewMut<'_>, combine: Combine) {
    assert!(!inputs.is_empty(), "a sum of no inputs");
    check_lengths(inputs, &target);
    if let ViewMut::Device(target) = target {
        let inputs: Vec<_> = inputs.iter().map(|input| of_device(*input)).collect();
        return inputs[0].device().tree_sum(&inputs, target, combine);
    }
    let mut tree = Tree::over(inputs.len());
    match combine {
        Combine::Assign => overwrite(
            target,
            inputs,
            #[inline(always)]
            |at| {
                tree.sum(
                    #[inline(always)]
                    |index| row::read(inputs[index], at),
                )
            },
        ),
        Combine::Add => add(
            target,
            inputs,
            #[inline(always)]
            |at| {
                tree.sum(
                    #[inline(always)]
                    |index| row::read(inputs[index], at),
                )
            },
        ),
    };
}

/// [`tree_sum`] over `before`, `target` itself and `after`, in this order, into `target`. All lie
/// on the host.
///
/// # Panics
///
/// If lengths differ.
pub fn tree_sum_in_place(before: &[View<'_>], target: ViewMut<'_>, after: &[View<'_>]) {
    check_lengths(before, &target);
    check_lengths(after, &target);
    let others = [before, after].concat();
    let place = before.len();
    match target {
        ViewMut::F32(target) => sum_in_place(&others, place, target),
        ViewMut::Bf16(target) => sum_in_place(&others, place, target),
        ViewMut::F16(target) => sum_in_place(&others, place, target),
        ViewMut::Device(_) => unreachable!("{HANDED_ON}"),
    }
}

fn check_lengths(inputs: &[View<'_>], target: &ViewMut<'_>) {
    let numel = target.as_view().numel();
    for (index, input) in inputs.iter().enumerate() {
        assert_eq!(input.numel(), numel, "input {index} of a sum and its target differ in length");
    }
}

fn sum_in_place<T: Element>(others: &[View<'_>], place: usize, target: &mut [T]) {
    let mut tree = Tree::over(others.len() + 1);
    change(
        target,
        others,
        #[inline(always)]
        |at, own| {
            tree.sum(
                #[inline(always)]
                |index| match index {
                    _ if index == place => *own,
                    _ => row::read(others[index - usize::from(index > place)], at),
                },
            )
        },
    );
}

/// Overwrites `target`, which is of the same dtype, by `source`; returns whether all is finite.
fn copy<T: Element>(source: &[T], target: ViewMut<'_>) -> bool {
    row::output(target, |output| {
        vectorised(
            #[inline(always)]
            || {
                let mut finite = true;
                row::each(
                    source.len(),
                    #[inline(always)]
                    |at| {
                        row::ask_of(source, at);
                        finite &= output.copy(source, at);
                    },
                );
                finite
            },
        )
    })
}

/// Overwrites `target` by the rows that are made from the inputs; returns whether all is finite.
#[inline(always)]
fn overwrite(target: ViewMut<'_>, inputs: &[View<'_>], mut make: impl FnMut(At) -> Row) -> bool {
    let numel = target.as_view().numel();
    row::output(target, |output| {
        vectorised(
            #[inline(always)]
            || {
                let mut finite = true;
                row::each(
                    numel.0,
                    #[inline(always)]
                    |at| {
                        for input in inputs {
                            row::ask(*input, at);
                        }
                        finite &= output.put(&make(at), at);
                    },
                );
                finite
            },
        )
    })
}

/// Adds to `target` the rows that are made from the inputs; returns whether all is finite.
#[inline(always)]
fn add(target: ViewMut<'_>, inputs: &[View<'_>], make: impl FnMut(At) -> Row) -> bool {
    match target {
        ViewMut::F32(target) => add_each(target, inputs, make),
        ViewMut::Bf16(target) => add_each(target, inputs, make),
        ViewMut::F16(target) => add_each(target, inputs, make),
        ViewMut::Device(_) => unreachable!("{HANDED_ON}"),
    }
}

#[inline(always)]
fn add_each<T: Element>(
    target: &mut [T],
    inputs: &[View<'_>],
    mut make: impl FnMut(At) -> Row,
) -> bool {
    change(
        target,
        inputs,
        #[inline(always)]
        |at, before| plus(before, &make(at)),
    )
}

/// Changes `target` to the rows that are made from it and the inputs; returns whether all is
/// finite.
#[inline(always)]
fn change<T: Element>(
    target: &mut [T],
    inputs: &[View<'_>],
    mut make: impl FnMut(At, &Row) -> Row,
) -> bool {
    vectorised(
        #[inline(always)]
        || {
            let mut finite = true;
            row::each(
                target.len(),
                #[inline(always)]
                |at| {
                    for input in inputs {
                        row::ask(*input, at);
                    }
                    row::ask_of(target, at);
                    let changed = make(at, &row::read_of(target, at));
                    finite &= row::put(&changed, target, at);
                },
            );
            finite
        },
    )
}

/// A balanced binary tree over so many rows.
struct Tree {
    count: usize,
    /// Sums of 2^k neighbours that wait for their neighbours', in falling order of k.
    waiting: Vec<Row>,
}

impl Tree {
    fn over(count: usize) -> Self {
        Self { count, waiting: Vec::new() }
    }

    #[inline(always)]
    fn sum(&mut self, leaf: impl Fn(usize) -> Row) -> Row {
        match self.count {
            1 => leaf(0),
            2 => plus(&leaf(0), &leaf(1)),
            _ => self.sum_of_more(leaf),
        }
    }

    /// As one counts in binary: each pair of sums over as many leaves becomes one.
    #[inline(always)]
    fn sum_of_more(&mut self, leaf: impl Fn(usize) -> Row) -> Row {
        self.waiting.clear();
        for index in 0..self.count {
            let mut sum = leaf(index);
            for _ in 0..index.trailing_ones() {
                let left = self.waiting.pop().expect("as many wait as the index has ones");
                sum = plus(&left, &sum);
            }
            self.waiting.push(sum);
        }
        let last = self.waiting.pop().expect("there is a leaf");
        self.waiting.iter().rev().fold(last, |sum, left| plus(left, &sum))
    }
}

#[inline(always)]
fn plus(left: &Row, right: &Row) -> Row {
    let mut sum = [0.0; ROW];
    for lane in 0..ROW {
        sum[lane] = left[lane] + right[lane];
    }
    sum
}
