//! From the rows of a projection to heads whose elements are turned by their position.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;

use super::op::{Fused, Input, apply, floats, tensor};
use super::simd::each_row;

/// The cosine and sine of every position's angles.
#[derive(Debug)]
pub(crate) struct Angles {
    /// `[context, head / 2]`.
    pub(crate) cos: Vec<f32>,
    /// `[context, head / 2]`.
    pub(crate) sin: Vec<f32>,
}

/// From `[batch * positions, heads * head]` to `[batch, heads, positions, head]`, where each pair
/// of elements (one of each half of a head) is turned by its position's angle, and scaled.
pub(crate) fn split_and_turn(
    input: &Tensor<2>,
    [batch, heads, positions, head]: [usize; 4],
    angles: &Arc<Angles>,
    scale: f32,
) -> Option<Tensor<4>> {
    let angles = Arc::clone(angles);
    apply(
        SplitAndTurn { shape: [batch, heads, positions, head], angles, scale },
        [Input::new(input)],
    )
}

#[derive(Clone, Debug)]
struct SplitAndTurn {
    shape: [usize; 4],
    angles: Arc<Angles>,
    scale: f32,
}

impl Fused<1> for SplitAndTurn {
    type Saved = ();

    fn forward(&self, [input]: [FlexTensor; 1]) -> (FlexTensor, ()) {
        let [batch, heads, positions, head] = self.shape;
        let input = floats(&input);
        let mut out = vec![0.0; batch * heads * positions * head];
        each_row(&mut out, head, |row, out| {
            let (position, head_index) = (row % positions, row / positions);
            let (batch, head_index) = (head_index / heads, head_index % heads);
            let from = (batch * positions + position) * heads + head_index;
            self.turn(position, 1.0, &input[from * head..][..head], out);
        });
        (tensor(out, self.shape), ())
    }

    fn backward(&self, (): (), grad: FlexTensor) -> [FlexTensor; 1] {
        let [batch, heads, positions, head] = self.shape;
        let grad = floats(&grad);
        let mut out = vec![0.0; grad.len()];
        each_row(&mut out, head, |row, out| {
            let (row, head_index) = (row / heads, row % heads);
            let (batch, position) = (row / positions, row % positions);
            let from = (batch * heads + head_index) * positions + position;
            self.turn(position, -1.0, &grad[from * head..][..head], out);
        });
        [tensor(out, [batch * positions, heads * head])]
    }
}

impl SplitAndTurn {
    /// Turns forwards for `sign` 1, and back for -1.
    #[inline(always)]
    fn turn(&self, position: usize, sign: f32, input: &[f32], out: &mut [f32]) {
        let half = out.len() / 2;
        let angles = position * half..(position + 1) * half;
        let (cos, sin) = (&self.angles.cos[angles.clone()], &self.angles.sin[angles]);
        let (a, b) = input.split_at(half);
        let (out_a, out_b) = out.split_at_mut(half);
        for index in 0..half {
            let (cos, sin) = (cos[index] * self.scale, sin[index] * sign * self.scale);
            out_a[index] = a[index] * cos - b[index] * sin;
            out_b[index] = b[index] * cos + a[index] * sin;
        }
    }
}
