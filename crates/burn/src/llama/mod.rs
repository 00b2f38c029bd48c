//! A Llama-style decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention.
//!
//! Weights have the names, shapes and meaning of Hugging Face's `LlamaForCausalLM`, which a test
//! holds against numbers made with `transformers`.

mod attention;
mod generate;
mod init;
mod layers;
mod rotary;
mod segments;

pub(crate) use attention::attend;
pub use generate::{Sampling, generate};
pub use init::init_param;
pub(crate) use layers::{Embedding, Linear, declared};
pub(crate) use segments::finish;
pub use segments::{Tokens, model};
