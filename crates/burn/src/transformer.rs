//! The transformer that a configuration names.

use burn::tensor::Device;
use oxizero_core::DType;
use oxizero_core::config::{ModelConfig, ModelKind};

use crate::llama::Tokens;
use crate::{BurnError, Model, gpt2, llama};

/// The model of `config` (which is validated), its weights of `dtype`, computed in `compute`.
pub fn model(
    config: &ModelConfig,
    dtype: DType,
    compute: DType,
    device: &Device,
) -> Result<Model<Tokens>, BurnError> {
    match config.kind {
        ModelKind::Llama => llama::model(config, dtype, compute, device),
        ModelKind::Gpt2 => gpt2::model(config, dtype, compute, device),
    }
}

/// Fills `values` with the initial weights of the parameter `name`, which depend on `seed`, the
/// name and the configuration alone.
pub fn init_param(config: &ModelConfig, name: &str, seed: u64, values: &mut [f32]) {
    match config.kind {
        ModelKind::Llama => llama::init_param(config, name, seed, values),
        ModelKind::Gpt2 => gpt2::init_param(config, name, seed, values),
    }
}
