//! Small programs whose instructions `scripts/instructions.sh` counts: the same ones in every run.
//!
//! Without arguments it lists the programs, each with the number of elements or parameters that it
//! works on; with a name it runs that one. What is counted is what
//! [`count_instructions_of`] calls, on all threads. Tensors fit in a small second-level cache,
//! where no kernel takes a way that depends on the size of one.

use std::error::Error;
use std::hint::black_box;
use std::thread;

use oxizero::comm::{Communicator, ReduceScatter, ReduceTarget, threads};
use oxizero::optim::{
    AdamW, Gradient, Hyper, LrSchedule, MomentOptions, Momentum, Optimizer, Sgd, Weights,
};
use oxizero::{
    Buffer, DType, Engine, EngineOptions, GradIn, GroupOptions, LossScale, Numel, OptimizerSetup,
    ParamId, ParamSpec, Precision, Stage, UnitId, WorldSize,
};
use oxizero_device::kernels::{self, Combine, Measure, Power};

type Failure = Box<dyn Error + Send + Sync>;

/// A name, how many are counted, and the deed.
type Program = (&'static str, usize, fn() -> Result<(), Failure>);

/// Elements of a tensor, and calls.
const NUMEL: usize = 1 << 14;
const CALLS: usize = 16;
const ELEMENTS: usize = NUMEL * CALLS;

/// Parameters of the engine, their elements, and those of a unit.
const PARAMS: usize = 1000;
const PARAM_NUMEL: usize = 64;
const UNIT_PARAMS: usize = 100;
const WINDOWS: usize = 4;

const PROGRAMS: [Program; 14] = [
    ("cast/f32/bf16", ELEMENTS, || cast(DType::F32, DType::Bf16)),
    ("cast/bf16/f32", ELEMENTS, || cast(DType::Bf16, DType::F32)),
    ("accumulate/bf16/f32", ELEMENTS, || accumulate(DType::Bf16)),
    ("accumulate/f32/f32", ELEMENTS, || accumulate(DType::F32)),
    ("sum/f32/f32", ELEMENTS, || sum(DType::F32)),
    ("sum/bf16/f32", ELEMENTS, || sum(DType::Bf16)),
    ("measure/f32", ELEMENTS, || measure(DType::F32)),
    ("measure/bf16", ELEMENTS, || measure(DType::Bf16)),
    ("adamw/f32/bf16", ELEMENTS, || update(&AdamW::new(MomentOptions::default())?, DType::F32)),
    ("adamw/bf16/bf16", ELEMENTS, || update(&AdamW::new(MomentOptions::default())?, DType::Bf16)),
    ("sgd/f32/bf16", ELEMENTS, || update(&Sgd::new(Momentum::Classical(0.9))?, DType::F32)),
    ("reduce_scatter/f32", ELEMENTS, || reduce_scatter(DType::F32)),
    ("reduce_scatter/bf16", ELEMENTS, || reduce_scatter(DType::Bf16)),
    ("engine", PARAMS * WINDOWS, engine),
];

fn main() {
    let Some(wanted) = std::env::args().nth(1) else {
        PROGRAMS.iter().for_each(|(name, count, _)| println!("{name} {count}"));
        return;
    };
    let program = PROGRAMS.iter().find(|(name, ..)| *name == wanted);
    let done = program.ok_or_else(|| "no program of this name".into()).and_then(|(.., run)| run());
    if let Err(error) = done {
        eprintln!("error: {wanted}: {error}");
        std::process::exit(1);
    }
}

/// What is called here is counted; the script knows the name.
#[inline(never)]
fn count_instructions_of<T>(deed: impl FnOnce() -> T) -> T {
    black_box(deed())
}

/// Elements that are neither all alike nor zero.
fn tensor(dtype: DType) -> Buffer {
    let values: Vec<f32> = (0..NUMEL).map(|index| (index % 61) as f32 / 64.0 - 0.25).collect();
    let mut tensor = Buffer::heap(Numel(NUMEL), dtype);
    kernels::cast(oxizero::View::F32(&values), tensor.view_mut());
    tensor
}

fn cast(from: DType, to: DType) -> Result<(), Failure> {
    let (source, mut target) = (tensor(from), tensor(to));
    count_instructions_of(|| {
        for _ in 0..CALLS {
            kernels::cast(source.view(), target.view_mut());
        }
    });
    Ok(())
}

fn accumulate(from: DType) -> Result<(), Failure> {
    let (source, mut target) = (tensor(from), tensor(DType::F32));
    let finite = count_instructions_of(|| {
        let add = |_| kernels::accumulate(source.view(), target.view_mut(), Combine::Add);
        (0..CALLS).map(add).fold(true, |all, finite| all & finite)
    });
    if finite { Ok(()) } else { Err("a sum is not finite".into()) }
}

fn sum(from: DType) -> Result<(), Failure> {
    let (sources, mut target) = ([tensor(from), tensor(from)], tensor(DType::F32));
    let sources = sources.each_ref().map(Buffer::view);
    count_instructions_of(|| {
        for _ in 0..CALLS {
            kernels::tree_sum(&sources, target.view_mut(), Combine::Assign);
        }
    });
    Ok(())
}

fn measure(dtype: DType) -> Result<(), Failure> {
    let grads = tensor(dtype);
    count_instructions_of(|| {
        for _ in 0..CALLS {
            black_box(kernels::measure(&[grads.view()], 3.0, Measure::Sum(Power::Two)));
        }
    });
    Ok(())
}

fn update(rule: &dyn Optimizer, grads: DType) -> Result<(), Failure> {
    let (grads, mut master, mut model) = (tensor(grads), tensor(DType::F32), tensor(DType::Bf16));
    let mut states: Vec<_> = rule.state_names().iter().map(|_| tensor(DType::F32)).collect();
    let hyper = Hyper { lr: 1e-3, weight_decay: 0.1 };
    count_instructions_of(|| {
        for step in 1..=CALLS as u64 {
            let mut states: Vec<_> = states.iter_mut().map(Buffer::view_mut).collect();
            let (master, model) = (master.view_mut(), Some(model.view_mut()));
            let grad = Gradient { values: grads.view(), divisor: 3.0, factor: 0.5 };
            rule.update(hyper, step, grad, Weights { master, states: &mut states, model });
        }
    });
    Ok(())
}

/// Of two ranks, as threads; what both do is counted.
fn reduce_scatter(dtype: DType) -> Result<(), Failure> {
    let world_size = WorldSize::new(2).ok_or("no ranks")?;
    let rank = move |comm: Box<dyn Communicator>| {
        thread::spawn(move || {
            let sum = Buffer::heap(Numel(NUMEL / 2), DType::F32);
            let target = ReduceTarget::Shard(sum, Combine::Assign);
            let mut op = ReduceScatter { partial: tensor(dtype), target };
            count_instructions_of(|| {
                for _ in 0..CALLS {
                    op = comm.reduce_scatter(op)?.wait()?;
                }
                Ok::<_, Failure>(())
            })
        })
    };
    let ranks: Vec<_> = threads::group(world_size).into_iter().map(rank).collect();
    ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank panicked")?)
}

/// Windows of one micro-batch on one rank, in ZeRO stage 2.
fn engine() -> Result<(), Failure> {
    let spec = |index: usize| {
        let (name, unit) = (index.to_string(), UnitId(index / UNIT_PARAMS));
        ParamSpec::new(name, &[PARAM_NUMEL], DType::F32, unit)
    };
    let specs: Vec<_> = (0..PARAMS).map(spec).collect();
    let units: Vec<_> = (0..PARAMS / UNIT_PARAMS).map(UnitId).collect();
    let optimizer = OptimizerSetup {
        rule: Box::new(AdamW::new(MomentOptions::default())?),
        groups: vec![GroupOptions { lr: 1e-3, weight_decay: 0.1 }],
        schedule: LrSchedule::constant(0),
    };
    let options = EngineOptions::new(Stage::Zero2, Precision::of_model(DType::F32));
    let comm = threads::group(WorldSize::ONE).remove(0);
    let mut initial = |_: ParamId, weights: &mut [f32]| weights.fill(1.0);
    let mut engine = Engine::new(specs, units.clone(), options, optimizer, comm, &mut initial)?;
    let gradient = [0.5; PARAM_NUMEL];
    let mut window = || {
        for unit in &units {
            engine.pre_forward(*unit)?;
            engine.post_forward(*unit)?;
        }
        for unit in units.iter().rev() {
            engine.pre_backward(*unit)?;
            for param in (unit.0 * UNIT_PARAMS..(unit.0 + 1) * UNIT_PARAMS).map(ParamId) {
                let values = oxizero::View::F32(&gradient);
                engine.grad_ready(param, GradIn { values, loss_scale: LossScale::ONE })?;
            }
            engine.post_backward(*unit)?;
        }
        engine.backward_end()?;
        engine.step().map(drop)
    };
    // The first window may make what the others find.
    window()?;
    count_instructions_of(|| (0..WINDOWS).try_for_each(|_| window()))?;
    Ok(())
}
