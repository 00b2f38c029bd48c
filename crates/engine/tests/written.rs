//! Weights that callers write: ranks that hold the same write the same.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::thread;

use oxizero::{
    BucketId, Buffer, Engine, EngineError, EngineOptions, GradIn, GroupOptions, OptimizerSetup,
    View,
};
use oxizero_comm::threads;
use oxizero_core::{
    Along, Batches, DType, LossScale, Mesh, MeshAxis, ParamId, ParamSpec, Precision, Rank, Stage,
    UnitId, WorldSize,
};
use oxizero_optim::{LrSchedule, Momentum, Sgd};

const NUMELS: [usize; 2] = [5, 70];

/// Two parameters of zeros on four ranks. The second is an expert, of which there are two: one on
/// the even ranks, one on the odd.
fn world(stage: Stage, test: impl Fn(usize, Engine) + Sync) {
    let size = |size| WorldSize::new(size).unwrap();
    let axis = |name: &str| MeshAxis::new(name, size(2), Batches::Different);
    let mesh = Mesh::new(vec![axis("data"), axis("expert")]).unwrap();
    let spec = |index: usize| ParamSpec {
        along: vec![Along::Reduced, [Along::Reduced, Along::Distinct][index]],
        ..ParamSpec::new(format!("p{index}"), &[NUMELS[index]], DType::F32, UnitId(0))
    };
    thread::scope(|scope| {
        for comm in threads::group(size(4)) {
            let (mesh, test) = (mesh.clone(), &test);
            scope.spawn(move || {
                let options = EngineOptions {
                    mesh: Some(mesh),
                    ..EngineOptions::new(stage, Precision::of_model(DType::F32))
                };
                let optimizer = OptimizerSetup {
                    rule: Box::new(Sgd::new(Momentum::None).unwrap()),
                    groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
                    schedule: LrSchedule::constant(0),
                };
                let rank = comm.rank().0;
                let initial = &mut |_, weights: &mut [f32]| weights.fill(0.0);
                let specs = vec![spec(0), spec(1)];
                let engine = Engine::new(specs, vec![], options, optimizer, comm, initial);
                test(rank, engine.unwrap());
            });
        }
    });
}

/// Gradients of zeros.
fn backward(engine: &mut Engine) {
    for (param, numel) in NUMELS.iter().enumerate() {
        let values = vec![0.0; *numel];
        let grad = GradIn { values: View::F32(&values), loss_scale: LossScale::ONE };
        engine.grad_ready(ParamId(param), grad).unwrap();
    }
    engine.backward_end().unwrap();
}

fn whole(engine: &mut Engine, param: usize) -> Vec<f32> {
    engine.full_param(ParamId(param)).unwrap().unwrap().f32().to_vec()
}

fn assert_names(error: &EngineError, name: &str, ranks: (usize, &[usize])) {
    let (EngineError::WritesDiffer { first, others, .. }
    | EngineError::ValuesDiffer { first, others, .. }) = error
    else {
        panic!("{error}")
    };
    let others: Vec<_> = others.iter().map(|rank| rank.0).collect();
    assert_eq!((first.0, &others[..]), ranks, "{error}");
    assert!(error.to_string().contains(&format!("`{name}`")), "{error}");
}

/// Writes to the gathered weights of the bucket that has the parameter, and lets them go.
fn write_gathered(engine: &mut Engine, param: usize, value: f32) {
    let has = |bucket: &oxizero_core::BucketSpec| bucket.params.contains(&ParamId(param));
    let (id, spec) = engine.buckets().cloned().enumerate().find(|(_, spec)| has(spec)).unwrap();
    let full = Buffer::heap(spec.layout.padded_numel(), spec.dtype);
    let mut full = engine.gather_into(BucketId(id), full).unwrap();
    let slot = spec.params.iter().position(|other| *other == ParamId(param)).unwrap();
    oxizero_device::kernels::fill(full.range_mut(spec.layout.slot(slot)), value);
    engine.take_over_gathered(BucketId(id), full.view()).unwrap();
    engine.let_go(BucketId(id)).unwrap();
}

#[test]
fn gathered_weights_that_are_written_unlike_are_named_by_the_next_step() {
    world(Stage::Zero3, |rank, mut engine| {
        for (param, odd, ranks) in
            [(0, 3, (0, &[3][..])), (1, 3, (1, &[3])), (0, 0, (0, &[1, 2, 3]))]
        {
            let value = |odd: bool| if odd { 8.0 } else { 2.0 + (param * rank % 2) as f32 };
            write_gathered(&mut engine, param, value(rank == odd));
            backward(&mut engine);
            for _ in 0..2 {
                assert_names(&engine.step().unwrap_err(), ["p0", "p1"][param], ranks);
            }
            write_gathered(&mut engine, param, value(false));
            engine.step().unwrap();
            assert_eq!(whole(&mut engine, param), vec![value(false); NUMELS[param]]);
        }
    });
}

#[test]
fn whole_weights_that_ranks_set_unlike_are_refused_at_once() {
    for stage in Stage::ALL {
        world(stage, |rank, mut engine| {
            for (param, ranks) in [(0, (0, &[3][..])), (1, (1, &[3]))] {
                let value = |odd: bool| if odd { 8.0 } else { 2.0 + (param * rank % 2) as f32 };
                let mut set = |odd| {
                    let values = vec![value(odd); NUMELS[param]];
                    engine.set_full_param(ParamId(param), View::F32(&values))
                };
                assert_names(&set(rank == 3).unwrap_err(), ["p0", "p1"][param], ranks);
                set(false).unwrap();
                assert_eq!(whole(&mut engine, param), vec![value(false); NUMELS[param]]);
                backward(&mut engine);
                engine.step().unwrap();
            }
        });
    }
}

/// Elsewhere each rank's part is its own.
#[test]
fn local_weights_that_all_ranks_have_whole_are_compared_by_the_next_step() {
    world(Stage::Zero0, |rank, mut engine| {
        let mut set = |value: f32| {
            engine.set_local_param(ParamId(1), View::F32(&[value; 70])).unwrap();
            backward(&mut engine);
            engine.step()
        };
        set(rank as f32 % 2.0).unwrap();
        let error = set(if rank == 2 { 5.0 } else { 4.0 }).unwrap_err();
        assert_names(&error, "p1", (0, &[2]));
    });
}

#[test]
fn errors_say_which_ranks() {
    let param = "w".to_owned();
    let others = vec![Rank(1), Rank(3)];
    let error = EngineError::WritesDiffer { param, first: Rank(0), others };
    assert!(
        error.to_string().contains("`w` has other weights on ranks 1, 3 than on rank 0"),
        "{error}"
    );
}
