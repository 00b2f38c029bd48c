//! A GPT-2-style decoder: LayerNorm, learned positions, GELU, biases (Radford et al., 2019).
//!
//! Weights have the names, shapes and meaning of Hugging Face's `GPT2LMHeadModel`, which a test
//! holds against numbers made with `transformers`.

mod init;
mod layers;
mod segments;

pub use init::init_param;
pub use segments::model;
