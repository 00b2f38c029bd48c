//! Tensor parallelism beside data parallelism: a parameter of which each rank holds a part, and one
//! that all hold. Run with `cargo run --release -p oxizero --example own_groups`.
//!
//! Four ranks, as threads, in a mesh of 2 x 2, fit `y = b + w . x` for a `w` of eight elements, of
//! which the two ranks along `tensor` hold four each. The engine reduces and shards (ZeRO stage 2)
//! along `data` alone; what travels along `tensor` in forward is the model's own business.

use std::error::Error;
use std::thread;

use oxizero::comm::{Communicator, threads};
use oxizero::optim::{LrSchedule, Momentum, Sgd};
use oxizero::{
    Along, Batches, DType, Engine, EngineOptions, GradIn, GradView, GroupOptions, Mesh, MeshAxis,
    OptimizerSetup, ParamId, ParamSpec, Precision, Scope, Stage, StepOutcome, UnitId, WorldSize,
};

type Failure = Box<dyn Error + Send + Sync>;

const UNIT: UnitId = UnitId(0);
const W: ParamId = ParamId(0);
const B: ParamId = ParamId(1);

fn main() -> Result<(), Failure> {
    let world_size = WorldSize::new(4).ok_or("no ranks")?;
    let ranks = threads::group(world_size).into_iter().map(|comm| thread::spawn(|| train(comm)));
    for rank in ranks.collect::<Vec<_>>() {
        rank.join().map_err(|_| "a rank panicked")??;
    }
    Ok(())
}

fn train(comm: Box<dyn Communicator>) -> Result<(), Failure> {
    let two = WorldSize::new(2).ok_or("no ranks")?;
    let mesh = Mesh::new(vec![
        MeshAxis::new("data", two, Batches::Different),
        MeshAxis::new("tensor", two, Batches::Same),
    ])?;
    let rank = comm.rank();
    let along_tensor = mesh.axis("tensor").ok_or("no such axis")?;
    let tensor = comm.split(&mesh.group(along_tensor, rank))?;

    let mut w = ParamSpec::new("w", &[4], DType::F32, UNIT); // this rank's part
    w.along = vec![Along::Reduced, Along::Split { dim: 0 }];
    let b = ParamSpec::new("b", &[1], DType::F32, UNIT); // reduced along data, else replicated
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::Classical(0.5))?),
        groups: vec![GroupOptions { lr: 0.2, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let options = EngineOptions {
        mesh: Some(mesh),
        ..EngineOptions::new(Stage::Zero2, Precision::of_model(DType::F32))
    };
    // Called on the first rank of those that hold the same weights.
    let mut initial = |_: ParamId, weights: &mut [f32]| weights.fill(0.0);
    let mut engine = Engine::new(vec![w, b], vec![UNIT], options, optimizer, comm, &mut initial)?;

    for step in 0..800 {
        // Ranks along `tensor` have the same batch_rank, and so the same point.
        let seed = 2 * step + engine.batch_rank().0;
        let x: [f32; 8] =
            std::array::from_fn(|i| ((seed + 1) * (i + 3) * (i + 5) % 101) as f32 / 101.0 - 0.5);
        let target = 1.0 + x.iter().zip(1..).map(|(x, i)| x * i as f32).sum::<f32>();
        let mine = &x[4 * tensor.rank().0..][..4];
        let error = forward(&mut engine, &*tensor, mine)? - target;
        let of_w: Vec<f32> = mine.iter().map(|x| error * x).collect();
        for (param, grad) in [(W, of_w), (B, vec![error])] {
            let values = GradView::F32(&grad);
            engine.grad_ready(param, GradIn { values, loss_scale: engine.loss_scale() })?;
        }
        engine.backward_end()?;
        if step % 200 == 0 {
            let part = engine.full_grads(Scope::DataParallel)?; // over `data`
            let whole = engine.full_grads(Scope::Global)?; // and over `tensor`
            let norms = engine.grad_norms()?; // of the whole tensors, each element once
            if rank.0 == 0 {
                let (part, whole) = (part.shape(W), whole.shape(W));
                println!("step {step}: gradient of w {part:?} of {whole:?}, norms {norms:.3?}");
            }
        }
        if let StepOutcome::Applied { norm_before, .. } = engine.step()?
            && rank.0 == 0
            && step % 200 == 0
        {
            println!("step {step}: error {error:.3}, gradient norm {norm_before:.3}");
        }
    }
    let w = engine.full_param(W)?.ok_or("w is trained")?;
    println!("rank {rank}: w {:.2?}", w.f32());
    Ok(())
}

/// The sum of both ranks' parts, and the bias, which both have.
fn forward(engine: &mut Engine, tensor: &dyn Communicator, x: &[f32]) -> Result<f32, Failure> {
    engine.pre_forward(UNIT)?;
    let weights = engine.unit_weights(UNIT)?;
    let values = |index: usize| match weights.params[index].view() {
        GradView::F32(values) => values.to_vec(),
        _ => vec![],
    };
    let (w, b) = (values(0), values(1));
    drop(weights);
    engine.post_forward(UNIT)?;
    let part: f32 = w.iter().zip(x).map(|(w, x)| w * x).sum();
    let parts = tensor.exchange("parts of a product", &part.to_le_bytes())?;
    let sum = parts.iter().filter_map(|bytes| bytes.as_slice().try_into().ok());
    Ok(b[0] + sum.map(f32::from_le_bytes).sum::<f32>())
}
