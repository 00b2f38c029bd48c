//! Causal self-attention with rotary positions and grouped queries.

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor, activation};
use oxizero_core::config::ModelConfig;

use super::layers::Linear;
use super::rotary::Rotary;

/// Attention in which each key and value head serves a group of query heads (Ainslie et al., 2023).
#[derive(Module, Debug)]
pub(super) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    heads: usize,
    kv_heads: usize,
}

impl Attention {
    pub(super) fn new(config: &ModelConfig, device: &Device) -> Self {
        let (hidden, head) = (config.hidden_size, config.head_size());
        Self {
            q_proj: Linear::new(hidden, config.heads * head, device),
            k_proj: Linear::new(hidden, config.kv_heads * head, device),
            v_proj: Linear::new(hidden, config.kv_heads * head, device),
            o_proj: Linear::new(config.heads * head, hidden, device),
            heads: config.heads,
            kv_heads: config.kv_heads,
        }
    }

    /// From `[batch * positions, hidden]` to the same; `positions` is the sequence length.
    pub(super) fn forward(&self, input: Tensor<2>, positions: usize, rotary: &Rotary) -> Tensor<2> {
        let [rows, hidden] = input.dims();
        let batch = rows / positions;
        let head = hidden / self.heads;
        let group = self.heads / self.kv_heads;
        let split = |tensor: Tensor<2>, heads: usize| {
            tensor.reshape([batch, positions, heads, head]).swap_dims(1, 2)
        };
        let q = rotary.turn(split(self.q_proj.forward(input.clone()), self.heads));
        let k = rotary.turn(split(self.k_proj.forward(input.clone()), self.kv_heads));
        let v = split(self.v_proj.forward(input), self.kv_heads);

        // A group's queries are the rows of one product with their key head: nothing is repeated.
        let q = q.mul_scalar((head as f64).powf(-0.5));
        let q = q.reshape([batch, self.kv_heads, group * positions, head]);
        let scores = q.matmul(k.transpose());
        let dtype = scores.dtype();
        let scores = scores.cast(DType::F32);
        let scores = scores.reshape([batch, self.heads, positions, positions]);
        let weights = activation::softmax(scores + rotary.mask(positions), 3).cast(dtype);
        let weights = weights.reshape([batch, self.kv_heads, group * positions, positions]);
        let mixed = weights.matmul(v).reshape([batch, self.heads, positions, head]);
        self.o_proj.forward(mixed.swap_dims(1, 2).reshape([rows, hidden]))
    }
}
