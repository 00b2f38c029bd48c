//! The layers of the model, with parameters that are named, shaped and used as in Hugging Face's
//! `LlamaForCausalLM`.

use burn::module::{Module, Param, ParamId};
use burn::tensor::{DType, Device, Int, Tensor, activation, module};

use crate::fused;

/// A parameter that has a shape and no value: the engine owns the values.
pub(crate) fn declared<const D: usize>(shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    let init = move |device: &Device, _| Tensor::zeros(shape, device);
    Param::uninitialized(ParamId::new(), init, device.clone(), true, shape.into())
}

/// A matrix product without bias.
#[derive(Module, Debug)]
pub(crate) struct Linear {
    /// `[outputs, inputs]`.
    weight: Param<Tensor<2>>,
}

impl Linear {
    pub(crate) fn new(inputs: usize, outputs: usize, device: &Device) -> Self {
        Self { weight: declared([outputs, inputs], device) }
    }

    /// From `[rows, inputs]` to `[rows, outputs]`.
    pub(crate) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        product(input, self.weight.val())
    }
}

/// A table of one vector a token, which may also be the head.
#[derive(Module, Debug)]
pub(crate) struct Embedding {
    /// `[vocabulary, hidden]`.
    weight: Param<Tensor<2>>,
}

impl Embedding {
    pub(crate) fn new(vocab_size: usize, hidden_size: usize, device: &Device) -> Self {
        Self { weight: declared([vocab_size, hidden_size], device) }
    }

    /// From `[batch, positions]` to `[batch, positions, hidden]`.
    pub(crate) fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        module::embedding(self.weight.val(), tokens)
    }

    /// From `[rows, hidden]` to `[rows, vocabulary]`.
    pub(crate) fn logits(&self, input: Tensor<2>) -> Tensor<2> {
        product(input, self.weight.val())
    }
}

/// Divides each vector by its root mean square (Zhang and Sennrich, 2019), in f32.
#[derive(Module, Debug)]
pub(super) struct RmsNorm {
    /// `[hidden]`.
    weight: Param<Tensor<1>>,
    epsilon: f64,
}

impl RmsNorm {
    pub(super) fn new(hidden_size: usize, epsilon: f64, device: &Device) -> Self {
        Self { weight: declared([hidden_size], device), epsilon }
    }

    /// From `[rows, hidden]` to the same.
    pub(super) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let weight = self.weight.val();
        if let Some(normed) = fused::rms_norm(&input, &weight, self.epsilon) {
            return normed;
        }
        let dtype = input.dtype();
        let wide = if dtype == DType::F32 { input } else { input.cast(DType::F32) };
        let square = wide.clone() * wide.clone();
        let scale = (square.mean_dim(1) + self.epsilon).sqrt().recip();
        let normed = wide * scale;
        let normed = if dtype == DType::F32 { normed } else { normed.cast(dtype) };
        normed * weight.unsqueeze()
    }
}

/// The feed-forward part: SwiGLU (Shazeer, 2020).
#[derive(Module, Debug)]
pub(super) struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl Mlp {
    pub(super) fn new(hidden_size: usize, intermediate_size: usize, device: &Device) -> Self {
        Self {
            gate_proj: Linear::new(hidden_size, intermediate_size, device),
            up_proj: Linear::new(hidden_size, intermediate_size, device),
            down_proj: Linear::new(intermediate_size, hidden_size, device),
        }
    }

    /// From `[rows, hidden]` to the same.
    pub(super) fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let gate = self.gate_proj.forward(input.clone());
        let up = self.up_proj.forward(input);
        let inner = fused::swiglu(&gate, &up).unwrap_or_else(|| activation::silu(gate) * up);
        self.down_proj.forward(inner)
    }
}

/// `input` of `[rows, inputs]` times the transpose of `weight`.
fn product(input: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    fused::linear(&input, &weight).unwrap_or_else(|| input.matmul(weight.transpose()))
}
