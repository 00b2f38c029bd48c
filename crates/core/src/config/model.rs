//! The transformer's shape.

use serde::{Deserialize, Serialize};

use super::check;
use crate::ConfigError;

/// A Llama-style transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelConfig {
    /// Tokens in the vocabulary; at least the byte tokenizer's 256.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward part.
    pub intermediate_size: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads; each has `hidden_size / heads` elements.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Tokens in a sequence.
    pub context: usize,
    /// Base of the rotary position angles.
    pub rope_theta: f64,
    /// Added to the mean square in RMSNorm.
    pub norm_eps: f64,
    /// Whether the head is the embedding's weight.
    pub tied: bool,
    /// Probability of dropping an element of what a block adds to the residual stream.
    pub dropout: f64,
    /// The dtype of forward and backward.
    pub compute: Compute,
}

/// The dtype in which forward and backward calculate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compute {
    /// What is fastest on the device: f32 on CPUs, whose back end has no bf16 arithmetic.
    #[default]
    Auto,
    /// f32; narrower weights are widened a unit at a time.
    F32,
    /// bf16.
    Bf16,
}

impl Default for ModelConfig {
    fn default() -> Self {
        Self {
            vocab_size: 256,
            hidden_size: 192,
            intermediate_size: 512,
            layers: 4,
            heads: 6,
            kv_heads: 2,
            context: 128,
            rope_theta: 10_000.0,
            norm_eps: 1e-5,
            tied: true,
            dropout: 0.0,
            compute: Compute::Auto,
        }
    }
}

impl ModelConfig {
    /// Elements of one attention head.
    pub fn head_size(&self) -> usize {
        self.hidden_size / self.heads
    }

    /// Refuses shapes that no such transformer has.
    pub fn validate(&self) -> Result<(), ConfigError> {
        check::count("model.vocab_size", self.vocab_size, 256..=check::SIZE_MAX)?;
        check::count("model.hidden_size", self.hidden_size, 1..=check::SIZE_MAX)?;
        check::count("model.intermediate_size", self.intermediate_size, 1..=check::SIZE_MAX)?;
        check::count("model.layers", self.layers, 1..=1 << 16)?;
        check::count("model.heads", self.heads, 1..=check::SIZE_MAX)?;
        check::count("model.kv_heads", self.kv_heads, 1..=check::SIZE_MAX)?;
        check::count("model.context", self.context, 1..=check::SIZE_MAX)?;
        check::positive("model.rope_theta", self.rope_theta)?;
        check::positive("model.norm_eps", self.norm_eps)?;
        check::below_one("model.dropout", self.dropout)?;
        self.validate_heads()
    }

    fn validate_heads(&self) -> Result<(), ConfigError> {
        let Self { hidden_size, heads, kv_heads, .. } = *self;
        let conflict = |second: String, advice: String| {
            Err(ConfigError::Conflict { first: format!("model.heads = {heads}"), second, advice })
        };
        let hidden = format!("model.hidden_size = {hidden_size}");
        if !hidden_size.is_multiple_of(heads) {
            let nearest = hidden_size.next_multiple_of(heads);
            return conflict(hidden, format!("heads must divide it; {nearest} would work"));
        }
        if !self.head_size().is_multiple_of(2) {
            let advice = format!(
                "a head of {} elements has no pairs to rotate; {} would work",
                self.head_size(),
                hidden_size + heads
            );
            return conflict(hidden, advice);
        }
        if !heads.is_multiple_of(kv_heads) {
            let nearest = (1..kv_heads.min(heads)).rev().find(|count| heads.is_multiple_of(*count));
            let nearest = nearest.unwrap_or(1);
            let advice = format!("it must divide the heads; {nearest} would work");
            return conflict(format!("model.kv_heads = {kv_heads}"), advice);
        }
        Ok(())
    }
}
