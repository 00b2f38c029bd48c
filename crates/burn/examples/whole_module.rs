//! A model that is no chain, trained over two ranks with ZeRO stage 2.
//!
//! Two towers read one half of the input each and meet in a product. The model is one segment:
//! any burn module and a loss. Its weights and gradients exist whole on every rank while it runs,
//! so that stages 1 and 2 save optimizer states, master weights and the gradients at rest. Run
//! with `cargo run --release -p oxizero-burn --example whole_module`.

use std::collections::HashMap;
use std::error::Error;
use std::thread;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use oxizero::chain::Recompute;
use oxizero::{Engine, EngineOptions, GroupOptions, OptimizerSetup};
use oxizero_burn::{Context, ModelBuilder, initial_values};
use oxizero_comm::{Communicator, threads};
use oxizero_core::{DType, ParamId, Precision, Stage, WorldSize};
use oxizero_optim::{AdamW, LrSchedule, MomentOptions};

const STEPS: u64 = 200;

#[derive(Module, Debug)]
struct Tower {
    inner: Linear,
    outer: Linear,
}

#[derive(Module, Debug)]
struct TwoTowers {
    left: Tower,
    right: Tower,
}

/// Two columns, `[rows, 1]` each, and the result, `[rows, 1]`.
struct Rows {
    left: Tensor<2>,
    right: Tensor<2>,
    targets: Tensor<2>,
}

impl Tower {
    fn new(device: &Device) -> Self {
        Self {
            inner: LinearConfig::new(1, 32).init(device),
            outer: LinearConfig::new(32, 8).init(device),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.outer.forward(self.inner.forward(input).tanh())
    }
}

impl TwoTowers {
    fn new(device: &Device) -> Self {
        Self { left: Tower::new(device), right: Tower::new(device) }
    }

    fn loss(&self, context: &Context<'_, Rows>) -> Tensor<1> {
        let Rows { left, right, targets } = context.batch;
        let product = self.left.forward(left.clone()) * self.right.forward(right.clone());
        (product.sum_dim(1) - targets.clone()).powi_scalar(2).mean()
    }
}

/// Trains this rank's part, and returns its first and its last loss.
fn train(comm: Box<dyn Communicator>) -> Result<[f32; 2], Box<dyn Error + Send + Sync>> {
    let device = Device::flex();
    let rank = comm.rank();
    let builder = ModelBuilder::new(DType::F32, DType::F32, &device);
    let model = builder.whole(TwoTowers::new(&device), TwoTowers::loss)?;
    let (specs, chain) = model.into_chain();

    let options = EngineOptions::new(Stage::Zero2, Precision::of_model(DType::F32));
    let group = |weight_decay| GroupOptions { lr: 3e-3, weight_decay };
    let optimizer = OptimizerSetup {
        rule: Box::new(AdamW::new(MomentOptions::default())?),
        groups: vec![group(0.01), group(0.0)], // of matrices, and of vectors
        schedule: LrSchedule::constant(0),
    };
    let names: Vec<String> = specs.iter().map(|spec| spec.name.clone()).collect();
    let values: HashMap<_, _> = initial_values("", TwoTowers::new(&device)).into_iter().collect();
    let mut write = |param: ParamId, target: &mut [f32]| {
        target.copy_from_slice(&values[&names[param.0]]);
    };
    let mut engine = Engine::new(specs, chain.order(), options, optimizer, comm, &mut write)?;

    let column = || Tensor::random([256, 1], Distribution::Uniform(-2.0, 2.0), &device);
    let (left, right) = (column(), column());
    let targets = (left.clone() * 2.0).sin() * right.clone().cos();
    let batch = Rows { left, right, targets };
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let loss = chain.train(&mut engine, &batch, Recompute::Never, step)?;
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
