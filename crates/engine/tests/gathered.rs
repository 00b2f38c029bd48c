//! Weights that rest sharded, gathered into memory of the front-end's own.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::thread;

use oxizero::{
    BucketId, Bucketing, Buffer, Bytes, Engine, EngineError, EngineOptions, GradIn, GroupOptions,
    Numel, OptimizerSetup, StepOutcome, View, ViewMut,
};
use oxizero_comm::threads;
use oxizero_core::{DType, LossScale, ParamId, ParamSpec, Precision, Stage, UnitId, WorldSize};
use oxizero_optim::{LrSchedule, Momentum, Sgd};

const NUMELS: [usize; 3] = [5, 70, 3];

/// Three parameters in two units, on each of two ranks; all weights are 64.
fn world(dtype: DType, test: impl Fn(usize, Engine) + Sync) {
    let spec = |(index, numel): (usize, &usize)| {
        ParamSpec::new(format!("p{index}"), &[*numel], dtype, UnitId(index / 2))
    };
    let specs: Vec<_> = NUMELS.iter().enumerate().map(spec).collect();
    thread::scope(|scope| {
        for comm in threads::group(WorldSize::new(2).unwrap()) {
            let (specs, test) = (specs.clone(), &test);
            scope.spawn(move || {
                let options = EngineOptions {
                    bucketing: Bucketing::Unit,
                    ..EngineOptions::new(Stage::Zero3, Precision::of_model(dtype))
                };
                let optimizer = OptimizerSetup {
                    rule: Box::new(Sgd::new(Momentum::None).unwrap()),
                    groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
                    schedule: LrSchedule::constant(0),
                };
                let rank = comm.rank().0;
                let initial = &mut |_, weights: &mut [f32]| weights.fill(64.0);
                let engine = Engine::new(specs, vec![], options, optimizer, comm, initial);
                test(rank, engine.unwrap());
            });
        }
    });
}

/// Full weights of a bucket, for as long as the engine knows of them.
fn gather(engine: &mut Engine, bucket: usize) -> Result<Buffer, EngineError> {
    let spec = engine.buckets().nth(bucket).unwrap();
    let full = Buffer::heap(spec.layout.padded_numel(), spec.dtype);
    engine.gather_into(BucketId(bucket), full)
}

fn give(engine: &mut Engine, param: usize) {
    let values = vec![1.0; NUMELS[param]];
    let grad = GradIn { values: View::F32(&values), loss_scale: LossScale::ONE };
    engine.grad_ready(ParamId(param), grad).unwrap();
}

fn master(engine: &mut Engine, param: usize) -> Vec<f32> {
    engine.full_param(ParamId(param)).unwrap().unwrap().f32().to_vec()
}

#[test]
fn what_is_gathered_counts_as_held_until_it_is_let_go() {
    world(DType::F32, |_, mut engine| {
        let full = gather(&mut engine, 0).unwrap();
        let layout = engine.buckets().next().unwrap().layout.clone();
        for (slot, numel) in NUMELS[..2].iter().enumerate() {
            let at = layout.slot(slot);
            assert_eq!(full.f32()[at], vec![64.0; *numel]);
        }
        assert_eq!(engine.memory().gathered, full.len());
        engine.backward_end().unwrap();
        assert!(matches!(engine.step(), Err(EngineError::WeightsInUse { .. })));
        engine.let_go(BucketId(0)).unwrap();
        assert_eq!(engine.memory().gathered, Bytes(0));
        assert!(matches!(engine.step(), Ok(StepOutcome::Applied { .. })));
    });
}

#[test]
fn what_is_written_to_gathered_weights_is_taken_over() {
    for dtype in [DType::F32, DType::Bf16] {
        world(dtype, |_, mut engine| {
            for param in 0..3 {
                give(&mut engine, param);
            }
            engine.backward_end().unwrap();
            engine.step().unwrap();
            let mut full = gather(&mut engine, 0).unwrap();
            let at = engine.buckets().next().unwrap().layout.slot(1);
            match full.range_mut(at) {
                ViewMut::F32(values) => values.fill(3.0),
                other => oxizero_device::kernels::cast(View::F32(&[3.0; 70]), other),
            }
            engine.take_over_gathered(BucketId(0), full.view()).unwrap();
            engine.let_go(BucketId(0)).unwrap();
            assert_eq!(master(&mut engine, 0), [63.0; 5]);
            assert_eq!(master(&mut engine, 1), [3.0; 70]);
            let again = gather(&mut engine, 0).unwrap();
            assert_eq!(again.range(0..5).bytes(), full.range(0..5).bytes());
        });
    }
}

#[test]
fn ranks_that_gather_different_buckets_are_told() {
    world(DType::F32, |rank, mut engine| {
        let error = gather(&mut engine, rank).unwrap_err();
        let name = ["p0", "p2"][rank];
        assert!(error.to_string().contains(&format!("the weights of `{name}`")), "{error}");
    });
}

#[test]
fn memory_that_does_not_fit_is_refused() {
    world(DType::F32, |_, mut engine| {
        let short = Buffer::heap(Numel(4), DType::F32);
        let refused = engine.gather_into(BucketId(0), short);
        assert!(matches!(refused, Err(EngineError::WrongNumel { .. })));
        let missing = Buffer::heap(Numel(4), DType::F32);
        assert!(matches!(
            engine.gather_into(BucketId(9), missing),
            Err(EngineError::Unknown { .. })
        ));
        assert!(gather(&mut engine, 1).is_ok(), "the engine goes on");
    });
}

/// Rank 0 uses one expert of the second unit, rank 1 none: both reduce at the same place.
#[test]
fn gradients_that_some_ranks_lack_are_zeros_when_their_end_is_said() {
    world(DType::F32, |rank, mut engine| {
        engine.await_grads_end(BucketId(0)).unwrap();
        gather(&mut engine, 1).unwrap();
        give(&mut engine, 2);
        engine.let_go(BucketId(1)).unwrap();
        if rank == 0 {
            give(&mut engine, 0);
        }
        let before = engine.communicator().traffic().collectives;
        engine.grads_end(BucketId(0)).unwrap();
        assert_eq!(engine.communicator().traffic().collectives, before + 1);
        gather(&mut engine, 1).unwrap();
        engine.let_go(BucketId(1)).unwrap();
        engine.backward_end().unwrap();
        engine.step().unwrap();
        assert_eq!(master(&mut engine, 0), [63.5; 5]);
        assert_eq!(master(&mut engine, 1), [64.0; 70]);
        assert_eq!(master(&mut engine, 2), [63.0; 3]);
    });
}
