//! The chain: embeddings, blocks, head and loss.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use oxizero_core::config::ModelConfig;
use oxizero_core::{DType, UnitId};

use super::layers::{Attention, LayerNorm, Mlp};
use crate::adapter::{BurnError, Context, Layer, Model, ModelBuilder, Source};
use crate::dropout;
use crate::llama::{Embedding, Linear, Tokens, declared, finish};

/// The model of `config` (which is validated), its weights of `dtype`, computed in `compute`.
///
/// Unit 0 is the embeddings, units 1 to `layers` the blocks. The head has a unit of its own, or
/// shares unit 0 where it is the embedding's weight.
pub fn model(
    config: &ModelConfig,
    dtype: DType,
    compute: DType,
    device: &Device,
) -> Result<Model<Tokens>, BurnError> {
    let ModelConfig { vocab_size, hidden_size, layers, context, .. } = *config;
    let embedding = || Embedding::new(vocab_size, hidden_size, device);
    let rows = config.positions.unwrap_or(context);
    let positions = Positions { weight: declared([rows, hidden_size], device) };
    let embed = Embed { wte: embedding(), wpe: positions, vocab_size };
    let norm = LayerNorm::new(config, device);
    let mut builder =
        ModelBuilder::new(dtype, compute, device).source(UnitId(0), "transformer", embed);
    for layer in 0..layers {
        let prefix = format!("transformer.h.{layer}");
        builder = builder.layer(UnitId(1 + layer), &prefix, Block::new(config, device));
    }
    let builder = if config.tied {
        builder.layer(UnitId(0), "transformer", TiedHead { ln_f: norm, wte: embedding() })
    } else {
        let lm_head = Linear::new(hidden_size, vocab_size, device);
        let head = Head { transformer: Norm { ln_f: norm }, lm_head };
        builder.layer(UnitId(1 + layers), "", head)
    };
    builder.build()
}

/// A table of one vector a position.
#[derive(Module, Debug)]
struct Positions {
    /// `[positions, hidden]`.
    weight: Param<Tensor<2>>,
}

#[derive(Module, Debug)]
struct Embed {
    wte: Embedding,
    wpe: Positions,
    vocab_size: usize,
}

impl Source<Tokens> for Embed {
    fn start(&self, context: &Context<'_, Tokens>) -> Tensor<3> {
        context.batch.check(self.vocab_size);
        let tokens = self.wte.forward(context.batch.tokens.clone());
        let [_, positions, _] = tokens.dims();
        let table = self.wpe.weight.val();
        let rows = table.dims()[0];
        assert!(positions <= rows, "{positions} positions, of {rows} that the model has");
        tokens + table.narrow(0, 0, positions).unsqueeze()
    }
}

#[derive(Module, Debug)]
struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Mlp,
    dropout: f64,
}

impl Block {
    fn new(config: &ModelConfig, device: &Device) -> Self {
        Self {
            ln_1: LayerNorm::new(config, device),
            attn: Attention::new(config, device),
            ln_2: LayerNorm::new(config, device),
            mlp: Mlp::new(config, device),
            dropout: config.dropout,
        }
    }
}

impl Layer<Tokens> for Block {
    fn run(&self, context: &Context<'_, Tokens>, input: Tensor<3>) -> Tensor<3> {
        let [batch, positions, hidden] = input.dims();
        let drop = |tensor, site| dropout(tensor, self.dropout, context.random(site));
        let stream: Tensor<2> = input.reshape([batch * positions, hidden]);
        let attended = self.attn.forward(self.ln_1.forward(stream.clone()), positions);
        let stream = stream + drop(attended, 0);
        let fed = self.mlp.forward(self.ln_2.forward(stream.clone()));
        (stream + drop(fed, 1)).reshape([batch, positions, hidden])
    }
}

/// The final norm, in a module of its own so that its path is `transformer.ln_f`.
#[derive(Module, Debug)]
struct Norm {
    ln_f: LayerNorm,
}

#[derive(Module, Debug)]
struct Head {
    transformer: Norm,
    lm_head: Linear,
}

impl Layer<Tokens> for Head {
    fn run(&self, context: &Context<'_, Tokens>, input: Tensor<3>) -> Tensor<3> {
        let normed = self.transformer.ln_f.forward(input.clone().flatten(0, 1));
        finish(context.batch, input.dims(), self.lm_head.forward(normed))
    }
}

#[derive(Module, Debug)]
struct TiedHead {
    ln_f: LayerNorm,
    wte: Embedding,
}

impl Layer<Tokens> for TiedHead {
    fn run(&self, context: &Context<'_, Tokens>, input: Tensor<3>) -> Tensor<3> {
        let normed = self.ln_f.forward(input.clone().flatten(0, 1));
        finish(context.batch, input.dims(), self.wte.logits(normed))
    }
}
