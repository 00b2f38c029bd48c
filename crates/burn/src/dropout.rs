//! Dropout whose mask repeats when a layer is recomputed, whatever other ranks' threads draw.

use burn::tensor::Tensor;
use oxizero_core::Random;

/// Drops elements with probability `prob` and scales the others up, in training alone: without a
/// generator it does nothing. Take the generator from [`Context::random`](crate::Context::random).
///
/// # Panics
///
/// If `prob` is not in `0..1`.
pub fn dropout<const D: usize>(input: Tensor<D>, prob: f64, random: Option<Random>) -> Tensor<D> {
    assert!((0.0..1.0).contains(&prob), "a dropout probability of {prob}");
    let Some(mut random) = random.filter(|_| prob > 0.0) else { return input };
    let kept = (1.0 / (1.0 - prob)) as f32;
    let numel = input.shape().num_elements();
    let draw = |_| if random.uniform() < prob as f32 { 0.0 } else { kept };
    let mask: Vec<f32> = (0..numel).map(draw).collect();
    let (device, dtype) = (input.device().without_autodiff(), input.dtype());
    let mask = Tensor::<1>::from_data(mask.as_slice(), (&device, dtype));
    let shape = input.dims();
    input * mask.reshape(shape)
}
