//! The transformer's shape.

use serde::{Deserialize, Serialize};

use super::check;
use crate::ConfigError;

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelConfig {
    /// How its blocks are built.
    pub kind: ModelKind,
    /// Tokens in the vocabulary; at least as many as the text's: 256 where they are bytes.
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
    /// Rows of the table of learned positions, which only GPT-2 has; absent for `context`.
    pub positions: Option<usize>,
    /// Base of the rotary position angles, which only Llama has.
    pub rope_theta: f64,
    /// Added to the mean square in RMSNorm, to the variance in LayerNorm.
    pub norm_eps: f64,
    /// Whether the head is the embedding's weight.
    pub tied: bool,
    /// Probability of dropping an element of what a block adds to the residual stream.
    pub dropout: f64,
    /// The dtype of forward and backward.
    pub compute: Compute,
}

/// The families of transformers, by the names that their weights and `config.json` have on the
/// Hugging Face hub.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases (Touvron et al.,
    /// 2023).
    #[default]
    Llama,
    /// LayerNorm, learned positions, GELU, biases (Radford et al., 2019).
    Gpt2,
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
            kind: ModelKind::Llama,
            vocab_size: 256,
            hidden_size: 192,
            intermediate_size: 512,
            layers: 4,
            heads: 6,
            kv_heads: 2,
            context: 128,
            positions: None,
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
        check::count("model.vocab_size", self.vocab_size, 1..=check::SIZE_MAX)?;
        check::count("model.hidden_size", self.hidden_size, 1..=check::SIZE_MAX)?;
        check::count("model.intermediate_size", self.intermediate_size, 1..=check::SIZE_MAX)?;
        check::count("model.layers", self.layers, 1..=1 << 16)?;
        check::count("model.heads", self.heads, 1..=check::SIZE_MAX)?;
        check::count("model.kv_heads", self.kv_heads, 1..=check::SIZE_MAX)?;
        check::count("model.context", self.context, 1..=check::SIZE_MAX)?;
        check::positive("model.rope_theta", self.rope_theta)?;
        check::positive("model.norm_eps", self.norm_eps)?;
        check::below_one("model.dropout", self.dropout)?;
        self.validate_positions()?;
        self.validate_heads()
    }

    fn validate_positions(&self) -> Result<(), ConfigError> {
        let Some(positions) = self.positions else { return Ok(()) };
        check::count("model.positions", positions, 1..=check::SIZE_MAX)?;
        let first = format!("model.positions = {positions}");
        let conflict = |second: String, advice: &str| {
            Err(ConfigError::Conflict { first: first.clone(), second, advice: advice.into() })
        };
        match self.kind {
            ModelKind::Llama => conflict(
                "model.kind = \"llama\"".into(),
                "its positions are angles, not learned; leave the field out",
            ),
            ModelKind::Gpt2 if positions < self.context => conflict(
                format!("model.context = {}", self.context),
                "a sequence may not be longer than the table of positions",
            ),
            ModelKind::Gpt2 => Ok(()),
        }
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
        if self.kind == ModelKind::Gpt2 && heads != kv_heads {
            let advice = format!("GPT-2 has a key and value head a query head; {heads} would work");
            return conflict(format!("model.kv_heads = {kv_heads}"), advice);
        }
        if self.kind == ModelKind::Llama && !self.head_size().is_multiple_of(2) {
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
