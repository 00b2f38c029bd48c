//! A burn module of your own, trained over two ranks with ZeRO stage 3.
//!
//! Its segments are written as usual in burn; `Source` and `Layer` say what each does, and
//! `ModelBuilder` puts them in order. Run with
//! `cargo run --release -p oxizero-burn --example own_module`.

use std::collections::HashMap;
use std::error::Error;
use std::thread;

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor, activation};
use oxizero::chain::Recompute;
use oxizero::{Engine, EngineOptions, GroupOptions, OptimizerSetup};
use oxizero_burn::{Context, Layer, ModelBuilder, Source, initial_values};
use oxizero_comm::{Communicator, threads};
use oxizero_core::{DType, Precision, Rank, Stage, UnitId, WorldSize};
use oxizero_optim::{AdamW, LrSchedule, MomentOptions};

const WIDTH: usize = 32;
const BLOCKS: usize = 3;
const STEPS: u64 = 200;

/// Points in the plane, `[points, 1, 2]`, and what the model is to say of each, `[points, 1, 1]`.
struct Points {
    inputs: Tensor<3>,
    targets: Tensor<3>,
}

#[derive(Module, Debug)]
struct Widen {
    linear: Linear,
}

impl Source<Points> for Widen {
    fn start(&self, context: &Context<'_, Points>) -> Tensor<3> {
        self.linear.forward(context.batch.inputs.clone())
    }
}

#[derive(Module, Debug)]
struct Residual {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Layer<Points> for Residual {
    fn run(&self, _: &Context<'_, Points>, input: Tensor<3>) -> Tensor<3> {
        let inner = activation::gelu(self.up.forward(self.norm.forward(input.clone())));
        input + self.down.forward(inner)
    }
}

#[derive(Module, Debug)]
struct SquaredError {
    linear: Linear,
}

impl Layer<Points> for SquaredError {
    fn run(&self, context: &Context<'_, Points>, input: Tensor<3>) -> Tensor<3> {
        let error = self.linear.forward(input) - context.batch.targets.clone();
        error.powi_scalar(2).mean().reshape([1, 1, 1])
    }
}

fn widen(device: &Device) -> Widen {
    Widen { linear: LinearConfig::new(2, WIDTH).init(device) }
}

fn residual(device: &Device) -> Residual {
    Residual {
        norm: LayerNormConfig::new(WIDTH).init(device),
        up: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
        down: LinearConfig::new(2 * WIDTH, WIDTH).init(device),
    }
}

fn squared_error(device: &Device) -> SquaredError {
    SquaredError { linear: LinearConfig::new(WIDTH, 1).init(device) }
}

/// The values that burn initialises such modules to. Modules that are given to a `ModelBuilder`
/// are templates, and never hold any.
fn initial(device: &Device) -> HashMap<String, Vec<f32>> {
    let mut values = initial_values("widen", widen(device));
    for block in 0..BLOCKS {
        values.extend(initial_values(&format!("block.{block}"), residual(device)));
    }
    values.extend(initial_values("head", squared_error(device)));
    values.into_iter().collect()
}

/// Trains this rank's part, and returns its first and its last loss.
fn train(comm: Box<dyn Communicator>) -> Result<[f32; 2], Box<dyn Error + Send + Sync>> {
    let device = Device::flex();
    let rank = comm.rank();
    let mut builder = ModelBuilder::new(DType::F32, DType::F32, &device).source(
        UnitId(0),
        "widen",
        widen(&device),
    );
    for block in 0..BLOCKS {
        let prefix = format!("block.{block}");
        builder = builder.layer(UnitId(1 + block), &prefix, residual(&device));
    }
    let head = squared_error(&device);
    let (specs, chain) = builder.layer(UnitId(1 + BLOCKS), "head", head).build()?.into_chain();

    let options = EngineOptions::new(Stage::Zero3, Precision::of_model(DType::F32));
    let group = |weight_decay| GroupOptions { lr: 3e-3, weight_decay };
    let optimizer = OptimizerSetup {
        rule: Box::new(AdamW::new(MomentOptions::default())?),
        groups: vec![group(0.01), group(0.0)], // of matrices, and of vectors
        schedule: LrSchedule::constant(0),
    };
    let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
    // The engine asks rank 0 alone, and tells the others.
    let values = if rank == Rank(0) { initial(&device) } else { HashMap::new() };
    let mut write = |param: oxizero_core::ParamId, target: &mut [f32]| {
        target.copy_from_slice(&values[&names[param.0]]);
    };
    let mut engine = Engine::new(specs, chain.order(), options, optimizer, comm, &mut write)?;

    let inputs = Tensor::random([256, 1, 2], Distribution::Uniform(-2.0, 2.0), &device);
    let targets = (inputs.clone().narrow(2, 0, 1) * 2.0).sin() * inputs.clone().narrow(2, 1, 1);
    let batch = Points { inputs, targets };
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = chain.train(&mut engine, &batch, Recompute::Always, step)?;
        engine.step()?;
        losses.push(loss.into_scalar::<f32>());
    }
    let losses = [losses[0], losses[losses.len() - 1]];
    println!("rank {rank}: loss {:.4} at first, {:.4} after {STEPS} steps", losses[0], losses[1]);
    Ok(losses)
}

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

pub(crate) fn run() -> Result<(), Box<dyn Error + Send + Sync>> {
    let world_size = WorldSize::new(2).ok_or("no ranks")?;
    let ranks: Vec<_> = threads::group(world_size)
        .into_iter()
        .map(|comm| thread::spawn(move || train(comm)))
        .collect();
    for rank in ranks {
        let [first, last] = rank.join().map_err(|_| "a rank panicked")??;
        if last >= 0.5 * first {
            return Err(format!("the loss fell from {first} to {last} only").into());
        }
    }
    Ok(())
}
