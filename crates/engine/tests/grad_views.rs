//! Views of a model's gradients are what a copy of them holds, whole tensors in pieces.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::thread;

use oxizero::comm::{CommError, Communicator, shm, threads};
use oxizero::optim::{LrSchedule, Momentum, Sgd};
use oxizero::{
    DType, Engine, EngineError, EngineOptions, GradIn, GradView, GroupOptions, LossScale,
    OptimizerSetup, ParamId, ParamSpec, Precision, Rank, Scope, Stage, StepOutcome, UnitId,
    WorldSize,
};

/// Elements of each parameter: one lies in all shards, most in one, one has none.
const NUMELS: [usize; 6] = [5, 700, 0, 33, 2, 64];
const FROZEN: ParamId = ParamId(3);

fn engine(stage: Stage, precision: Precision, comm: Box<dyn Communicator>) -> Engine {
    let spec = |(index, numel): (usize, &usize)| ParamSpec {
        trainable: ParamId(index) != FROZEN,
        ..ParamSpec::new(format!("p{index}"), &[*numel], precision.model, UnitId(index / 4))
    };
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::None).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let specs = NUMELS.iter().enumerate().map(spec).collect();
    let options = EngineOptions::new(stage, precision);
    Engine::new(specs, vec![], options, optimizer, comm, &mut |_, _| ()).unwrap()
}

/// Every parameter but the last and the frozen one has a gradient.
fn backward(engine: &mut Engine) {
    let rank = engine.communicator().rank().0;
    for (index, numel) in NUMELS.iter().enumerate().take(NUMELS.len() - 1) {
        if ParamId(index) != FROZEN {
            let of = |element| (7 * element % 61 + 5 * rank + index) as f32;
            let values: Vec<f32> = (0..*numel).map(of).collect();
            let grad = GradIn { values: GradView::F32(&values), loss_scale: LossScale::ONE };
            engine.grad_ready(ParamId(index), grad).unwrap();
        }
    }
    engine.backward_end().unwrap();
}

/// Ranks that share memory, as threads.
fn sharing(name: &str, ranks: usize) -> Vec<Box<dyn Communicator>> {
    let world_size = WorldSize::new(ranks).unwrap();
    let socket = format!("oxizero-grad-views-{name}-{}", std::process::id());
    let options = |rank| shm::Options::new(rank, world_size, &socket);
    thread::scope(|scope| {
        let connect = |rank| scope.spawn(move || shm::connect(rank).unwrap());
        let ranks: Vec<_> = world_size.ranks().map(|rank| connect(options(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn on_each(world: Vec<Box<dyn Communicator>>, deed: impl Fn(Box<dyn Communicator>) + Copy + Send) {
    thread::scope(|scope| {
        world.into_iter().for_each(|comm| drop(scope.spawn(move || deed(comm))));
    });
}

/// The values of each trained parameter, put together from pieces that must tile it.
fn viewed(engine: &mut Engine, is_copy: bool) -> Vec<(String, Vec<f32>)> {
    let views = engine.view_grads().unwrap();
    assert_eq!(views.is_copy(), is_copy);
    assert!(views.get(FROZEN).is_none() && views.get(ParamId(99)).is_none());
    assert!(matches!(views.named("no"), Err(EngineError::UnknownParam { .. })));
    let mut all = Vec::new();
    for (spec, pieces) in views.iter() {
        let mut whole = Vec::new();
        for piece in pieces {
            assert_eq!(piece.elements, whole.len()..whole.len() + piece.values.len());
            assert!(!piece.values.is_empty());
            whole.extend_from_slice(piece.values);
        }
        assert_eq!(whole.len(), spec.numel().0);
        all.push((spec.name.clone(), whole));
    }
    views.close().unwrap();
    all
}

fn copied(engine: &mut Engine) -> Vec<(String, Vec<f32>)> {
    let grads = engine.full_grads(Scope::DataParallel).unwrap();
    let f32 = |view| match view {
        GradView::F32(values) => values.to_vec(),
        _ => panic!("gradients accumulate in f32"),
    };
    grads.iter().map(|(param, view)| (grads.name(param).unwrap().into(), f32(view))).collect()
}

#[test]
fn views_hold_what_a_copy_holds_in_every_stage_and_a_step_is_as_without_them() {
    for (stage, ranks) in Stage::ALL.iter().flat_map(|stage| [1, 2, 3].map(|n| (*stage, n))) {
        let precision = Precision::of_model(DType::F32);
        let shared = sharing(&format!("{stage:?}{ranks}"), ranks);
        on_each(shared, |comm| views_are_copies(engine(stage, precision, comm), false));
        let copying = threads::group(WorldSize::new(ranks).unwrap());
        let is_copy = stage != Stage::Zero0;
        on_each(copying, |comm| views_are_copies(engine(stage, precision, comm), is_copy));
    }
}

fn views_are_copies(mut engine: Engine, is_copy: bool) {
    for _ in 0..2 {
        backward(&mut engine);
        let views = viewed(&mut engine, is_copy);
        assert_eq!(views, copied(&mut engine));
        assert!(views.iter().any(|(_, values)| values.iter().any(|value| *value != 0.0)));
        // What is set afterwards is what is viewed next.
        engine.set_full_grad(ParamId(1), GradView::F32(&[2.5; NUMELS[1]])).unwrap();
        let views = viewed(&mut engine, is_copy);
        assert_eq!(views[1], ("p1".into(), vec![2.5; NUMELS[1]]));
        assert_eq!(views, copied(&mut engine));
        drop(engine.view_grads().unwrap());
        assert!(matches!(engine.step().unwrap(), StepOutcome::Applied { .. }));
        assert!(matches!(engine.view_grads(), Err(EngineError::Consumed)));
        assert_eq!(engine.memory().gradients, engine.plan().rest.gradients);
    }
}

#[test]
fn views_are_one_collective_however_many_parameters_and_move_nothing() {
    on_each(sharing("traffic", 2), |comm| {
        let mut engine = engine(Stage::Zero2, Precision::of_model(DType::F32), comm);
        backward(&mut engine);
        copied(&mut engine); // the window is reduced here
        let start = engine.communicator().traffic();
        viewed(&mut engine, false);
        let traffic = engine.communicator().traffic() - start;
        assert_eq!((traffic.collectives, traffic.bytes.0), (1, 0));
    });
}

#[test]
fn accumulators_that_would_round_what_is_divided_are_not_viewed() {
    on_each(sharing("narrow", 2), |comm| {
        let narrow = Precision { accumulate: DType::Bf16, ..Precision::of_model(DType::Bf16) };
        let mut engine = engine(Stage::Zero2, narrow, comm);
        backward(&mut engine);
        let error = engine.view_grads().map(drop).unwrap_err().to_string();
        assert!(error.contains("`p0`") && error.contains("accumulates in bf16"), "{error}");
        copied_narrow(&mut engine);
    });
}

/// A refusal leaves the engine as it was.
fn copied_narrow(engine: &mut Engine) {
    engine.full_grads(Scope::DataParallel).unwrap();
    assert!(matches!(engine.step().unwrap(), StepOutcome::Applied { .. }));
}

#[test]
fn a_rank_that_keeps_its_views_is_named_and_one_that_panics_too() {
    for panics in [false, true] {
        let world_size = WorldSize::new(2).unwrap();
        let socket = format!("oxizero-kept-views-{panics}-{}", std::process::id());
        thread::scope(|scope| {
            for rank in world_size.ranks() {
                let options = shm::Options {
                    deadline: std::time::Duration::from_millis(500),
                    ..shm::Options::new(rank, world_size, &socket)
                };
                scope.spawn(move || keep_views(shm::connect(options).unwrap(), panics));
            }
        });
    }
}

fn keep_views(comm: Box<dyn Communicator>, panics: bool) {
    let rank = comm.rank();
    let mut engine = engine(Stage::Zero2, Precision::of_model(DType::F32), comm);
    backward(&mut engine);
    let views = engine.view_grads().unwrap();
    if rank == Rank(1) && panics {
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _views = views;
            panic!("planned by the test");
        }));
        return assert!(caught.is_err());
    }
    if rank == Rank(1) {
        thread::sleep(std::time::Duration::from_millis(1000));
        return drop(views);
    }
    match (views.close().unwrap_err(), panics) {
        (EngineError::Comm(CommError::Timeout { rank: Rank(1), .. }), false) => {}
        (EngineError::Comm(CommError::Aborted { rank: Rank(1), .. }), true) => {}
        (error, _) => panic!("{error}"),
    }
    assert!(matches!(engine.step(), Err(EngineError::Comm(_))));
}
