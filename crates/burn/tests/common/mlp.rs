//! A small model of burn's own layers, as a user would write it.

use std::sync::Arc;

use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{DType as BurnDType, Device, Int, Tensor, activation};
use oxizero_burn::{Context, Layer, Model, ModelBuilder, Source, initial_values};
use oxizero_core::{DType, UnitId};

use super::{Weights, ids};

/// Tokens and targets.
#[derive(Debug)]
pub struct Batch {
    pub tokens: Tensor<2, Int>,
    pub targets: Tensor<2, Int>,
}

#[derive(Module, Debug)]
pub struct Embed {
    pub wte: Embedding,
}

/// A residual block.
#[derive(Module, Debug)]
pub struct Mlp {
    pub norm: LayerNorm,
    pub up: Linear,
    pub down: Linear,
}

/// The head shares the embedding's weight.
#[derive(Module, Debug)]
pub struct Head {
    pub norm: LayerNorm,
    pub wte: Embedding,
}

impl Source<Batch> for Embed {
    fn start(&self, context: &Context<'_, Batch>) -> Tensor<3> {
        self.wte.forward(context.batch.tokens.clone())
    }
}

impl Layer<Batch> for Mlp {
    fn run(&self, _: &Context<'_, Batch>, input: Tensor<3>) -> Tensor<3> {
        let inner = activation::gelu(self.up.forward(self.norm.forward(input.clone())));
        input + self.down.forward(inner)
    }
}

impl Layer<Batch> for Head {
    fn run(&self, context: &Context<'_, Batch>, input: Tensor<3>) -> Tensor<3> {
        let table = self.wte.weight.val().transpose().unsqueeze::<3>();
        let logits = self.norm.forward(input).matmul(table).cast(BurnDType::F32);
        let targets = context.batch.targets.clone().unsqueeze_dim::<3>(2);
        let log_probs = activation::log_softmax(logits, 2);
        log_probs.gather(2, targets).mean().neg().reshape([1, 1, 1])
    }
}

/// The sizes of the model and its batch.
#[derive(Clone, Copy)]
pub struct Size {
    pub hidden: usize,
    pub vocabulary: usize,
    pub blocks: usize,
    pub batch: [usize; 2],
}

pub const SMALL: Size = Size { hidden: 64, vocabulary: 97, blocks: 3, batch: [2, 16] };

impl Size {
    pub fn embed(&self, device: &Device) -> Embed {
        Embed { wte: EmbeddingConfig::new(self.vocabulary, self.hidden).init(device) }
    }

    pub fn mlp(&self, device: &Device) -> Mlp {
        Mlp {
            norm: LayerNormConfig::new(self.hidden).init(device),
            up: LinearConfig::new(self.hidden, 4 * self.hidden).init(device),
            down: LinearConfig::new(4 * self.hidden, self.hidden).init(device),
        }
    }

    pub fn head(&self, embed: &Embed, device: &Device) -> Head {
        Head { norm: LayerNormConfig::new(self.hidden).init(device), wte: embed.wte.clone() }
    }

    /// The chain over templates, the head tied to the embedding.
    pub fn model(&self, dtype: DType, compute: DType) -> Model<Batch> {
        let device = Device::flex();
        let embed = self.embed(&device);
        let head = self.head(&embed, &device);
        let mut builder =
            ModelBuilder::new(dtype, compute, &device).source(UnitId(0), "ends", embed);
        for block in 0..self.blocks {
            let prefix = format!("block.{block}");
            builder = builder.layer(UnitId(block + 1), &prefix, self.mlp(&device));
        }
        builder.layer(UnitId(0), "ends", head).build().unwrap()
    }

    pub fn batch(&self) -> Batch {
        let [sequences, positions] = self.batch;
        let numbers = |shift: i64| {
            let number = |i| (i * i * 31 + shift) % self.vocabulary as i64;
            ids(
                (0..(sequences * positions) as i64).map(number).collect(),
                self.batch,
                &Device::flex(),
            )
        };
        Batch { tokens: numbers(1), targets: numbers(5) }
    }
}

/// An initialised model outside the engine, and its weights for the engine.
pub struct Plain {
    pub embed: Embed,
    pub blocks: Vec<Mlp>,
    pub head: Head,
}

impl Plain {
    /// Initialises a model, and rounds its weights to `dtype`.
    pub fn new(size: &Size, seed: u64) -> Self {
        let device = Device::flex().autodiff();
        device.seed(seed);
        let embed = size.embed(&device);
        let head = size.head(&embed, &device);
        Self { embed, blocks: (0..size.blocks).map(|_| size.mlp(&device)).collect(), head }
    }

    pub fn weights(&self, model: &Model<Batch>) -> Weights {
        let mut values = initial_values("ends", self.embed.clone());
        for (block, module) in self.blocks.iter().enumerate() {
            values.extend(initial_values(&format!("block.{block}"), module.clone()));
        }
        values.extend(initial_values("ends", self.head.clone()));
        let values = Arc::new(values);
        Weights::new(&model.specs, |spec, target| {
            let found = values.iter().find(|(name, _)| *name == spec.name);
            target.copy_from_slice(&found.unwrap().1);
        })
    }
}
