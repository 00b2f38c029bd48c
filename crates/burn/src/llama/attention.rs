//! Causal self-attention with rotary positions and grouped queries.

use burn::module::Module;
use burn::tensor::{Bool, DType, Device, Tensor, activation};
use oxizero_core::config::ModelConfig;

use super::layers::Linear;
use super::rotary::Rotary;
use crate::fused;

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
        let scale = (head as f32).powf(-0.5);
        let heads = |heads| [batch, heads, positions, head];
        let q = rotary.split(self.q_proj.forward(input.clone()), heads(self.heads), scale);
        let k = rotary.split(self.k_proj.forward(input.clone()), heads(self.kv_heads), 1.0);
        let v = self.v_proj.forward(input);
        let v = v.reshape([batch, positions, self.kv_heads, head]).swap_dims(1, 2);

        // A group's queries are the rows of one product with their key head: nothing is repeated.
        let grouped = |width| [batch, self.kv_heads, group * positions, width];
        let scores = q.reshape(grouped(head)).matmul(k.transpose());
        let weights = attend(scores.reshape([batch, self.heads, positions, positions]));
        let mixed = weights.reshape(grouped(positions)).matmul(v).reshape(heads(self.heads));
        self.o_proj.forward(mixed.swap_dims(1, 2).reshape([rows, hidden]))
    }
}

/// The softmax of scores over the positions up to a row's own, in f32.
pub(crate) fn attend(scores: Tensor<4>) -> Tensor<4> {
    if let Some(weights) = fused::causal_softmax(&scores) {
        return weights;
    }
    let (device, dtype) = (scores.device(), scores.dtype());
    let [_, _, positions, _] = scores.dims();
    let later = Tensor::<2, Bool>::tril_mask([positions, positions], 0, &device);
    let scores = scores.cast(DType::F32).mask_fill(later.unsqueeze(), f32::NEG_INFINITY);
    activation::softmax(scores, 3).cast(dtype)
}
