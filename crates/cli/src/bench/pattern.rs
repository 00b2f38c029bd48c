//! Elements that repeat, so that what becomes of many is known from a few.

use oxizero_device::{View, ViewMut, kernels};

/// Elements that are written at once, at least.
const BLOCK: usize = 1 << 12;

/// Writes to `target`, elements from `first` on of a tensor whose element `index` is
/// `element(index % period)`.
pub(crate) fn fill(
    mut target: ViewMut<'_>,
    first: usize,
    period: usize,
    element: impl Fn(usize) -> f32,
) {
    let numel = target.as_view().numel().0;
    let len = BLOCK.next_multiple_of(period);
    let block = first..first + len.min(numel);
    let block: Vec<f32> = block.map(|index| element(index % period)).collect();
    for start in (0..numel).step_by(len) {
        let end = numel.min(start + len);
        kernels::cast(View::F32(&block[..end - start]), target.reborrow().range(start..end));
    }
}

/// Whether every element is, to the bit, the one `period` before it.
pub(crate) fn repeats(values: View<'_>, period: usize) -> bool {
    let bytes = values.bytes();
    let mut periods = bytes.chunks(period * values.dtype().size());
    let first = periods.next().unwrap_or_default();
    periods.all(|period| *period == first[..period.len()])
}

#[cfg(test)]
mod tests {
    use oxizero_core::{DType, Numel};
    use oxizero_device::Buffer;

    use super::*;

    #[test]
    fn elements_repeat_from_wherever_they_start() {
        for (dtype, first) in [(DType::F32, 0), (DType::Bf16, 0), (DType::F32, 9)] {
            let mut buffer = Buffer::heap(Numel(3 * BLOCK), dtype);
            fill(buffer.view_mut(), first, 61, |index| index as f32);
            assert!(repeats(buffer.view(), 61) && !repeats(buffer.view(), 60));
            let mut wide = vec![0.0; 3 * BLOCK];
            kernels::cast(buffer.view(), ViewMut::F32(&mut wide));
            assert!(wide.iter().zip(first..).all(|(value, index)| *value == (index % 61) as f32));
        }
    }

    #[test]
    fn one_element_unlike_its_likes_is_found() {
        let mut values = vec![1.0; 1000];
        assert!(repeats(View::F32(&values), 61));
        values[999] = 2.0;
        assert!(!repeats(View::F32(&values), 61));
    }
}
