//! Rotary positions (Su et al., 2021), in the half-split convention of Hugging Face's Llama.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use oxizero_core::config::ModelConfig;

/// What every block needs of the positions: made once, shared by all of them.
#[derive(Clone, Debug)]
pub(super) struct Rotary {
    tables: Arc<Tables>,
}

#[derive(Debug)]
struct Tables {
    /// `[1, 1, context, head]`, each half alike.
    cos: Tensor<4>,
    /// `[1, 1, context, head]`, the first half negated.
    sin: Tensor<4>,
    /// `[1, 1, context, context]`: 0 where a position may look, else minus infinity.
    mask: Tensor<4>,
}

impl Rotary {
    pub(super) fn new(config: &ModelConfig, device: &Device) -> Self {
        let (context, head) = (config.context, config.head_size());
        let table = |of: fn(f64) -> f64, first_half: f64| {
            let value = |index: usize| {
                let (position, element) = (index / head, index % head);
                let exponent = 2.0 * (element % (head / 2)) as f64 / head as f64;
                let angle = position as f64 * config.rope_theta.powf(-exponent);
                (of(angle) * if element < head / 2 { first_half } else { 1.0 }) as f32
            };
            constant((0..context * head).map(value).collect(), [1, 1, context, head], device)
        };
        let visible = |index: usize| {
            if index % context <= index / context { 0.0 } else { f32::NEG_INFINITY }
        };
        let mask = (0..context * context).map(visible).collect();
        let tables = Tables {
            cos: table(f64::cos, 1.0),
            sin: table(f64::sin, -1.0),
            mask: constant(mask, [1, 1, context, context], device),
        };
        Self { tables: Arc::new(tables) }
    }

    /// Turns each pair of elements by its position's angle; from `[batch, heads, positions, head]`
    /// to the same.
    pub(super) fn turn(&self, input: Tensor<4>) -> Tensor<4> {
        let [batch, heads, positions, head] = input.dims();
        let dtype = input.dtype();
        let table = |table: &Tensor<4>| table.clone().narrow(2, 0, positions).cast(dtype);
        let halves = input.clone().reshape([batch, heads, positions, 2, head / 2]);
        let swapped = halves.flip([3]).reshape([batch, heads, positions, head]);
        input * table(&self.tables.cos) + swapped * table(&self.tables.sin)
    }

    /// Added to scores, hides every later position; `[1, 1, positions, positions]`, f32.
    pub(super) fn mask(&self, positions: usize) -> Tensor<4> {
        self.tables.mask.clone().narrow(2, 0, positions).narrow(3, 0, positions)
    }
}

fn constant(values: Vec<f32>, shape: [usize; 4], device: &Device) -> Tensor<4> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::F32))
}
