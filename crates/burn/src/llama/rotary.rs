//! Rotary positions (Su et al., 2021), in the half-split convention of Hugging Face's Llama.

use std::sync::{Arc, OnceLock};

use burn::tensor::{DType, Tensor, TensorData};
use oxizero_core::config::ModelConfig;

use crate::fused::{self, Angles};

/// The angles of every position: made when they are first needed, shared by all blocks.
#[derive(Clone, Debug)]
pub(super) struct Rotary {
    angles: Arc<OnceLock<Arc<Angles>>>,
    context: usize,
    half: usize,
    theta: f64,
}

impl Rotary {
    pub(super) fn new(config: &ModelConfig) -> Self {
        let (context, half) = (config.context, config.head_size() / 2);
        Self { angles: Arc::default(), context, half, theta: config.rope_theta }
    }

    fn angles(&self) -> &Arc<Angles> {
        self.angles.get_or_init(|| {
            let angle = |index: usize| {
                let (position, pair) = (index / self.half, index % self.half);
                position as f64 * self.theta.powf(-(pair as f64) / self.half as f64)
            };
            let table = |of: fn(f64) -> f64| {
                (0..self.context * self.half).map(|index| of(angle(index)) as f32).collect()
            };
            Arc::new(Angles { cos: table(f64::cos), sin: table(f64::sin) })
        })
    }

    /// From a projection, `[batch * positions, heads * head]`, to `[batch, heads, positions,
    /// head]`, each pair of elements turned by its position's angle, and scaled.
    ///
    /// # Panics
    ///
    /// If there are more positions than the model's context.
    pub(super) fn split(&self, input: Tensor<2>, shape: [usize; 4], scale: f32) -> Tensor<4> {
        let [_, _, positions, _] = shape;
        assert!(positions <= self.context, "{positions} positions, context {}", self.context);
        let turned = fused::split_and_turn(&input, shape, self.angles(), scale);
        turned.unwrap_or_else(|| self.split_by_burn(input, shape, scale))
    }

    fn split_by_burn(&self, input: Tensor<2>, shape: [usize; 4], scale: f32) -> Tensor<4> {
        let [batch, heads, positions, head] = shape;
        let half = head / 2;
        let (device, dtype) = (input.device().without_autodiff(), input.dtype());
        let table = |values: &[f32]| {
            let data = TensorData::new(values[..positions * half].to_vec(), [positions, half]);
            let table = Tensor::<2>::from_data(data, (&device, DType::F32)) * scale;
            table.cast(dtype).unsqueeze::<4>()
        };
        let (cos, sin) = (table(&self.angles().cos), table(&self.angles().sin));
        let input = input.reshape([batch, positions, heads, head]).swap_dims(1, 2);
        let (a, b) = (input.clone().narrow(3, 0, half), input.narrow(3, half, half));
        let turned_a = a.clone() * cos.clone() - b.clone() * sin.clone();
        Tensor::cat(vec![turned_a, b * cos + a * sin], 3)
    }
}
