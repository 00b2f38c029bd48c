//! The layers of the model, with parameters that are named, shaped and used as in Hugging Face's
//! `GPT2LMHeadModel`.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, activation};
use oxizero_core::config::ModelConfig;

use crate::llama::{attend, declared};

/// A matrix product with bias, whose matrix lies the other way round than in a linear layer.
#[derive(Module, Debug)]
pub(super) struct Conv1D {
    /// `[inputs, outputs]`.
    weight: Param<Tensor<2>>,
    /// `[outputs]`.
    bias: Param<Tensor<1>>,
}

impl Conv1D {
    fn new(inputs: usize, outputs: usize, device: &Device) -> Self {
        Self { weight: declared([inputs, outputs], device), bias: declared([outputs], device) }
    }

    /// From `[rows, inputs]` to `[rows, outputs]`.
    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        input.matmul(self.weight.val()) + self.bias.val().unsqueeze()
    }
}

/// Shifts and scales each vector to mean 0 and variance 1 (Ba et al., 2016), in f32.
#[derive(Module, Debug)]
pub(super) struct LayerNorm {
    /// `[hidden]`.
    weight: Param<Tensor<1>>,
    /// `[hidden]`.
    bias: Param<Tensor<1>>,
    epsilon: f64,
}

impl LayerNorm {
    pub(super) fn new(config: &ModelConfig, device: &Device) -> Self {
        let vector = || declared([config.hidden_size], device);
        Self { weight: vector(), bias: vector(), epsilon: config.norm_eps }
    }

    /// From `[rows, hidden]` to the same.
    pub(super) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let dtype = input.dtype();
        let wide = if dtype == DType::F32 { input } else { input.cast(DType::F32) };
        let centred = wide.clone() - wide.mean_dim(1);
        let variance = (centred.clone() * centred.clone()).mean_dim(1);
        let normed = centred * (variance + self.epsilon).sqrt().recip();
        let normed = if dtype == DType::F32 { normed } else { normed.cast(dtype) };
        normed * self.weight.val().unsqueeze() + self.bias.val().unsqueeze()
    }
}

/// Causal self-attention, whose queries, keys and values come of one product.
#[derive(Module, Debug)]
pub(super) struct Attention {
    c_attn: Conv1D,
    c_proj: Conv1D,
    heads: usize,
}

impl Attention {
    pub(super) fn new(config: &ModelConfig, device: &Device) -> Self {
        let hidden = config.hidden_size;
        Self {
            c_attn: Conv1D::new(hidden, 3 * hidden, device),
            c_proj: Conv1D::new(hidden, hidden, device),
            heads: config.heads,
        }
    }

    /// From `[batch * positions, hidden]` to the same; `positions` is the sequence length.
    pub(super) fn forward(&self, input: Tensor<2>, positions: usize) -> Tensor<2> {
        let [rows, hidden] = input.dims();
        let (batch, head) = (rows / positions, hidden / self.heads);
        let all = self.c_attn.forward(input);
        let part = |index: usize| {
            let part = all.clone().narrow(1, index * hidden, hidden);
            part.reshape([batch, positions, self.heads, head]).swap_dims(1, 2)
        };
        let scale = (head as f32).powf(-0.5);
        let weights = attend((part(0) * scale).matmul(part(1).transpose()));
        let mixed = weights.matmul(part(2));
        self.c_proj.forward(mixed.swap_dims(1, 2).reshape([rows, hidden]))
    }
}

/// The feed-forward part.
#[derive(Module, Debug)]
pub(super) struct Mlp {
    c_fc: Conv1D,
    c_proj: Conv1D,
}

impl Mlp {
    pub(super) fn new(config: &ModelConfig, device: &Device) -> Self {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (c_fc, c_proj) =
            (Conv1D::new(hidden, inner, device), Conv1D::new(inner, hidden, device));
        Self { c_fc, c_proj }
    }

    /// From `[rows, hidden]` to the same.
    pub(super) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.c_proj.forward(gelu(self.c_fc.forward(input)))
    }
}

/// GELU as its tanh approximation (Hendrycks and Gimpel, 2016), which is `gelu_new` on the hub.
fn gelu(input: Tensor<2>) -> Tensor<2> {
    activation::gelu_approximate(input)
}
