//! The chain: embedding, blocks, head and loss.

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData, activation};
use oxizero_core::config::ModelConfig;
use oxizero_core::{DType as WeightDType, UnitId};

use super::attention::Attention;
use super::layers::{Embedding, Linear, Mlp, RmsNorm};
use super::rotary::Rotary;
use crate::adapter::{BurnError, Context, Layer, Model, ModelBuilder, Source};
use crate::{dropout, fused};

/// A batch of sequences.
///
/// A model panics on a number that is not below its `vocab_size`, and says which and where: no
/// number stands for a position to leave out.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[batch, positions]`, at most `context` positions.
    pub tokens: Tensor<2, Int>,
    /// The token after each, of the same shape. Without targets the last segment's output is the
    /// logits, `[batch, positions, vocabulary]` in f32, in place of the mean cross entropy (in
    /// nats, `[1, 1, 1]`).
    pub targets: Option<Tensor<2, Int>>,
}

impl Tokens {
    /// Byte-level sequences of equal length: every byte is a token, and the byte after it its
    /// target.
    ///
    /// # Panics
    ///
    /// If there are no sequences, or their lengths differ or are below 2.
    pub fn of_bytes(sequences: &[&[u8]], device: &Device) -> Self {
        Self::of_numbers(sequences, device)
    }

    /// Sequences of equal length: every number is a token, and the number after it its target.
    ///
    /// # Panics
    ///
    /// If there are no sequences, or their lengths differ or are below 2.
    pub fn of_numbers<T: Copy + Into<i64>>(sequences: &[impl AsRef<[T]>], device: &Device) -> Self {
        let positions = sequences[0].as_ref().len() - 1;
        assert!(positions > 0, "a sequence without a next token");
        let tensor = |offset: usize| {
            let numbers = sequences.iter().flat_map(|sequence| {
                let sequence = sequence.as_ref();
                assert_eq!(sequence.len(), positions + 1, "sequences differ in length");
                &sequence[offset..offset + positions]
            });
            let ids: Vec<i64> = numbers.map(|number| (*number).into()).collect();
            let data = TensorData::new(ids, [sequences.len(), positions]);
            Tensor::<2, Int>::from_data(data, device)
        };
        Self { tokens: tensor(0), targets: Some(tensor(1)) }
    }

    /// Refuses what would be looked up outside of the embedding, or of a row of logits.
    pub(crate) fn check(&self, vocab_size: usize) {
        let all = [("token", Some(&self.tokens)), ("target", self.targets.as_ref())];
        for (what, numbers) in all.into_iter().filter_map(|(what, some)| Some((what, some?))) {
            let [_, positions] = numbers.dims();
            let is_outside = |number: &i64| !(0..vocab_size as i64).contains(number);
            let data = numbers.to_data();
            let found = data.iter::<i64>().enumerate().find(|(_, number)| is_outside(number));
            if let Some((index, number)) = found {
                panic!(
                    "{what} {number} (sequence {}, position {}) is not in the vocabulary of \
                     {vocab_size} (0 to {})",
                    index / positions,
                    index % positions,
                    vocab_size - 1
                );
            }
        }
    }
}

/// The model of `config` (which is validated), its weights of `dtype`, computed in `compute`.
///
/// Unit 0 is the embedding, units 1 to `layers` the blocks. The head has a unit of its own, or
/// shares unit 0 where it is the embedding's weight.
pub fn model(
    config: &ModelConfig,
    dtype: WeightDType,
    compute: WeightDType,
    device: &Device,
) -> Result<Model<Tokens>, BurnError> {
    let ModelConfig { vocab_size, hidden_size, layers, .. } = *config;
    let rotary = Rotary::new(config);
    let embedding = || Embedding::new(vocab_size, hidden_size, device);
    let norm = RmsNorm::new(hidden_size, config.norm_eps, device);
    let mut builder = ModelBuilder::new(dtype, compute, device).source(
        UnitId(0),
        "model",
        Embed { embed_tokens: embedding(), vocab_size },
    );
    for layer in 0..layers {
        let prefix = format!("model.layers.{layer}");
        builder = builder.layer(UnitId(1 + layer), &prefix, Block::new(config, &rotary, device));
    }
    let builder = if config.tied {
        builder.layer(UnitId(0), "model", TiedHead { norm, embed_tokens: embedding() })
    } else {
        let lm_head = Linear::new(hidden_size, vocab_size, device);
        builder.layer(UnitId(1 + layers), "", Head { model: Norm { norm }, lm_head })
    };
    builder.build()
}

#[derive(Module, Debug)]
struct Embed {
    embed_tokens: Embedding,
    vocab_size: usize,
}

impl Source<Tokens> for Embed {
    fn start(&self, context: &Context<'_, Tokens>) -> Tensor<3> {
        context.batch.check(self.vocab_size);
        self.embed_tokens.forward(context.batch.tokens.clone())
    }
}

#[derive(Module, Debug)]
struct Block {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: Mlp,
    #[module(skip)]
    rotary: Rotary,
    dropout: f64,
}

impl Block {
    fn new(config: &ModelConfig, rotary: &Rotary, device: &Device) -> Self {
        let norm = || RmsNorm::new(config.hidden_size, config.norm_eps, device);
        Self {
            input_layernorm: norm(),
            self_attn: Attention::new(config, device),
            post_attention_layernorm: norm(),
            mlp: Mlp::new(config.hidden_size, config.intermediate_size, device),
            rotary: rotary.clone(),
            dropout: config.dropout,
        }
    }
}

impl Layer<Tokens> for Block {
    fn run(&self, context: &Context<'_, Tokens>, input: Tensor<3>) -> Tensor<3> {
        let [batch, positions, hidden] = input.dims();
        let drop = |tensor, site| dropout(tensor, self.dropout, context.random(site));
        let stream: Tensor<2> = input.reshape([batch * positions, hidden]);
        let normed = self.input_layernorm.forward(stream.clone());
        let stream = stream + drop(self.self_attn.forward(normed, positions, &self.rotary), 0);
        let normed = self.post_attention_layernorm.forward(stream.clone());
        let stream = stream + drop(self.mlp.forward(normed), 1);
        stream.reshape([batch, positions, hidden])
    }
}

/// The final norm, in a module of its own so that its path is `model.norm`.
#[derive(Module, Debug)]
struct Norm {
    norm: RmsNorm,
}

#[derive(Module, Debug)]
struct Head {
    model: Norm,
    lm_head: Linear,
}

impl Layer<Tokens> for Head {
    fn run(&self, context: &Context<'_, Tokens>, input: Tensor<3>) -> Tensor<3> {
        let normed = self.model.norm.forward(input.clone().flatten(0, 1));
        finish(context.batch, input.dims(), self.lm_head.forward(normed))
    }
}

#[derive(Module, Debug)]
struct TiedHead {
    norm: RmsNorm,
    embed_tokens: Embedding,
}

impl Layer<Tokens> for TiedHead {
    fn run(&self, context: &Context<'_, Tokens>, input: Tensor<3>) -> Tensor<3> {
        let normed = self.norm.forward(input.clone().flatten(0, 1));
        finish(context.batch, input.dims(), self.embed_tokens.logits(normed))
    }
}

/// The loss, or the logits where the batch has no targets. `logits` is `[rows, vocabulary]`.
pub(crate) fn finish(
    batch: &Tokens,
    [sequences, positions, _]: [usize; 3],
    logits: Tensor<2>,
) -> Tensor<3> {
    let logits = logits.cast(DType::F32);
    let Some(targets) = batch.targets.clone() else {
        let vocab_size = logits.dims()[1];
        return logits.reshape([sequences, positions, vocab_size]);
    };
    let targets: Tensor<1, Int> = targets.reshape([sequences * positions]);
    let loss = fused::cross_entropy(&logits, &targets).unwrap_or_else(|| {
        let log_probs = activation::log_softmax(logits, 1);
        log_probs.gather(1, targets.unsqueeze_dim(1)).mean().neg()
    });
    loss.reshape([1, 1, 1])
}
