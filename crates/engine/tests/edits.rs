//! What an edit may be, and whom a step that it spoils is blamed on.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use oxizero::optim::{LrSchedule, Momentum, Sgd};
use oxizero::{
    Bytes, DType, Engine, EngineError, EngineOptions, GradIn, GradView, GroupOptions, LossScale,
    Norm, OptimizerSetup, ParamId, ParamSpec, Precision, Scope, Stage, StepOutcome, UnitId,
    WorldSize,
};
use oxizero_comm::{Communicator, threads};

fn sgd() -> OptimizerSetup {
    OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::None).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    }
}

fn with(
    specs: Vec<ParamSpec>,
    precision: Precision,
    comm: Box<dyn Communicator>,
) -> Result<Engine, EngineError> {
    let options = EngineOptions::new(Stage::Zero2, precision);
    Engine::new(specs, vec![], options, sgd(), comm, &mut |_, _| ())
}

/// Two parameters of one element.
fn engine(precision: Precision, comm: Box<dyn Communicator>) -> Engine {
    let spec = |name| ParamSpec::new(name, &[1], precision.model, UnitId(0));
    with(vec![spec("first"), spec("second")], precision, comm).unwrap()
}

fn give(engine: &mut Engine, grads: [f32; 2]) {
    for (index, grad) in grads.into_iter().enumerate() {
        let values = GradView::F32(std::slice::from_ref(&grad));
        engine.grad_ready(ParamId(index), GradIn { values, loss_scale: LossScale::ONE }).unwrap();
    }
    engine.backward_end().unwrap();
}

/// One rank, whose parameters have these gradients.
fn after_backward(precision: Precision, grads: [f32; 2]) -> Engine {
    let mut engine = engine(precision, threads::group(WorldSize::ONE).remove(0));
    give(&mut engine, grads);
    engine
}

#[test]
fn an_edit_is_blamed_for_what_it_made_infinite() {
    let mut engine = after_backward(Precision::of_model(DType::F32), [f32::INFINITY, 1.0]);
    engine.set_full_grad(ParamId(0), GradView::F32(&[0.0])).unwrap();
    engine.set_full_grad(ParamId(1), GradView::F32(&[f32::NAN])).unwrap();
    let StepOutcome::Skipped { parameter, .. } = engine.step().unwrap() else { panic!("applied") };
    assert_eq!(parameter, "second");
}

#[test]
fn values_that_would_be_rounded_are_refused() {
    let narrow = Precision { accumulate: DType::Bf16, ..Precision::of_model(DType::Bf16) };
    let mut engine = after_backward(narrow, [1.0, 1.0]);
    let error = engine.set_full_grad(ParamId(0), GradView::F32(&[1.0])).unwrap_err();
    let [expected, got] = [DType::Bf16, DType::F32];
    let EngineError::WrongDType { expected: stored, got: given, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!((stored, given), (expected, got));
    let own = engine.full_grad(ParamId(0)).unwrap().unwrap();
    engine.set_full_grad(ParamId(0), own.view()).unwrap();
    engine.set_full_param(ParamId(0), own.view()).unwrap(); // bf16 to f32 is exact
}

/// 1e5 is finite in f32, and not in f16, which travels.
#[test]
fn the_rank_whose_gradient_overflows_as_it_is_stored_is_blamed() {
    std::thread::scope(|scope| {
        for comm in threads::group(WorldSize::new(3).unwrap()) {
            scope.spawn(move || {
                let grad = if comm.rank().0 == 1 { 1e5 } else { 1.0 };
                let mut engine = engine(Precision::of_model(DType::F16), comm);
                give(&mut engine, [1.0, grad]);
                let StepOutcome::Skipped { parameter, rank, .. } = engine.step().unwrap() else {
                    panic!("applied")
                };
                assert_eq!((parameter.as_str(), rank.0), ("second", 1));
            });
        }
    });
}

#[test]
fn gradients_of_another_model_are_refused() {
    let mut engine = after_backward(Precision::of_model(DType::F32), [1.0, 2.0]);
    let spec = |name| ParamSpec::new(name, &[1], DType::F32, UnitId(0));
    let mut other = with(
        vec![spec("second"), spec("first")],
        Precision::of_model(DType::F32),
        threads::group(WorldSize::ONE).remove(0),
    )
    .unwrap();
    give(&mut other, [1.0, 2.0]);
    let grads = other.full_grads(Scope::DataParallel).unwrap();
    let error = engine.set_full_grads(&grads).unwrap_err().to_string();
    assert!(error.contains("`second`") && error.contains("another model"), "{error}");
}

#[test]
fn what_no_memory_holds_is_refused_before_it_is_asked_for() {
    let refused = |spec: ParamSpec, order, align| {
        let comm = threads::group(WorldSize::ONE).remove(0);
        let precision = Precision::of_model(DType::F32);
        let options = EngineOptions { align, ..EngineOptions::new(Stage::Zero2, precision) };
        let made = Engine::new(vec![spec], order, options, sgd(), comm, &mut |_, _| ());
        made.map(drop).unwrap_err().to_string()
    };
    let spec = || ParamSpec::new("p", &[1], DType::F32, UnitId(0));
    let far = vec![UnitId(0), UnitId(1 << 34)];
    assert!(refused(spec(), far, Bytes(64)).contains("order"));
    assert!(refused(spec(), vec![], Bytes(1 << 40)).contains("align"));
    let long = ParamSpec { shape: vec![0, usize::MAX], ..spec() };
    assert!(refused(long, vec![], Bytes(64)).contains("larger than memory"));
}

#[test]
fn gradients_are_clipped_to_the_norm_of_all_and_rounded_only_if_they_are() {
    let narrow = Precision { accumulate: DType::Bf16, ..Precision::of_model(DType::Bf16) };
    for precision in [Precision::of_model(DType::F32), narrow] {
        let mut engine = after_backward(precision, [3.0, 4.0]);
        assert_eq!(engine.clip_grads(f64::INFINITY, Norm::One).unwrap(), 7.0);
        assert_eq!(engine.clip_grads(5.0, Norm::Two).unwrap(), 5.0);
        assert_eq!(engine.clip_grads(2.5, Norm::Two).unwrap(), 5.0);
        assert_eq!(engine.clip_grads(4.0, Norm::Infinity).unwrap(), 2.0);
        let StepOutcome::Applied { norm_before, .. } = engine.step().unwrap() else { panic!() };
        assert_eq!(norm_before, 2.5);
        assert!(matches!(engine.clip_grads(1.0, Norm::Two), Err(EngineError::Consumed)));
    }
    let mut engine = after_backward(Precision::of_model(DType::F32), [f32::NAN, 4.0]);
    assert!(engine.clip_grads(1.0, Norm::Infinity).unwrap().is_nan());
    assert!(matches!(engine.clip_grads(-1.0, Norm::Two), Err(EngineError::Config(_))));
    assert!(matches!(engine.step().unwrap(), StepOutcome::Skipped { .. }));
}
