//! The engine without a framework: gradients of your own, read and edited as a whole before the
//! step. Run with `cargo run --release -p oxizero --example own_gradients`.
//!
//! Two ranks, as threads, fit `y = a + b x` to points of their own, with ZeRO stage 2. Between
//! backward and step every rank sees the whole gradient, and keeps `b` where it is for a while.

use std::error::Error;
use std::thread;

use oxizero::comm::{Communicator, threads};
use oxizero::optim::{LrSchedule, Momentum, Sgd};
use oxizero::{
    DType, Engine, EngineOptions, GradIn, GradView, GroupOptions, OptimizerSetup, ParamId,
    ParamSpec, Precision, Scope, Stage, StepOutcome, UnitId, ViewMut, WorldSize,
};

const UNIT: UnitId = UnitId(0);
const A: ParamId = ParamId(0);
const B: ParamId = ParamId(1);

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn Error + Send + Sync>> {
    let world_size = WorldSize::new(2).ok_or("no ranks")?;
    let ranks = threads::group(world_size).into_iter().map(|comm| thread::spawn(|| train(comm)));
    for rank in ranks.collect::<Vec<_>>() {
        rank.join().map_err(|_| "a rank panicked")??;
    }
    Ok(())
}

fn train(comm: Box<dyn Communicator>) -> Result<(), Box<dyn Error + Send + Sync>> {
    let rank = comm.rank().0;
    let params = ["a", "b"].map(|name| ParamSpec::new(name, &[1], DType::F32, UNIT));
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::Classical(0.5))?),
        groups: vec![GroupOptions { lr: 0.1, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let options = EngineOptions::new(Stage::Zero2, Precision::of_model(DType::F32));
    // Called on rank 0 alone, whose weights all ranks take.
    let mut initial = |_: ParamId, weights: &mut [f32]| weights.fill(0.0);
    let mut engine =
        Engine::new(params.into(), vec![UNIT], options, optimizer, comm, &mut initial)?;

    for step in 0..80 {
        let [a, b] = weights(&mut engine)?;
        // The mean squared error over this rank's points of y = 3 - 2 x, and its gradient.
        let points = (0..8).map(|i| (2 * i + rank) as f32 / 8.0);
        let errors = points.map(|x| (x, a + b * x - (3.0 - 2.0 * x)));
        let (of_a, of_b) = errors.fold((0.0, 0.0), |(of_a, of_b), (x, error)| {
            (of_a + error / 4.0, of_b + error * x / 4.0)
        });
        for (param, grad) in [(A, of_a), (B, of_b)] {
            let values = GradView::F32(std::slice::from_ref(&grad));
            engine.grad_ready(param, GradIn { values, loss_scale: engine.loss_scale() })?;
        }
        engine.backward_end()?;
        if step < 10 {
            // One collective, whole gradients on every rank.
            let mut grads = engine.full_grads(Scope::DataParallel)?;
            if let Some(ViewMut::F32(of_b)) = grads.get_mut(B) {
                of_b.fill(0.0);
            }
            engine.set_full_grads(&grads)?;
        }
        match engine.step()? {
            StepOutcome::Skipped { parameter, .. } => println!("skipped for {parameter}"),
            StepOutcome::Applied { norm_before, .. } if rank == 0 && step % 20 == 0 => {
                println!("step {step}: a {a:.3}, b {b:.3}, gradient norm {norm_before:.4}");
            }
            _ => {}
        }
    }
    let [a, b] = weights(&mut engine)?;
    println!("rank {rank}: a {a:.3}, b {b:.3}");
    Ok(())
}

/// The model weights, which stage 2 keeps whole on every rank. Views of them must be gone before
/// the step.
fn weights(engine: &mut Engine) -> Result<[f32; 2], Box<dyn Error + Send + Sync>> {
    engine.pre_forward(UNIT)?;
    let weights = engine.unit_weights(UNIT)?;
    let first = |index: usize| match weights.params[index].view() {
        GradView::F32(values) => values[0],
        _ => f32::NAN,
    };
    let both = [first(0), first(1)];
    drop(weights);
    engine.post_forward(UNIT)?;
    Ok(both)
}
