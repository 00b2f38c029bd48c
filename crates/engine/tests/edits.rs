//! What an edit may be, and whom a step that it spoils is blamed on.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use oxizero::optim::{LrSchedule, Momentum, Sgd};
use oxizero::{
    DType, Engine, EngineError, EngineOptions, GradIn, GradView, GroupOptions, LossScale,
    OptimizerSetup, ParamId, ParamSpec, Precision, Stage, StepOutcome, UnitId, WorldSize,
};
use oxizero_comm::{Communicator, threads};

/// Two parameters of one element.
fn engine(precision: Precision, comm: Box<dyn Communicator>) -> Engine {
    let spec = |name| ParamSpec::new(name, &[1], precision.model, UnitId(0));
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::None).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let specs = vec![spec("first"), spec("second")];
    let options = EngineOptions::new(Stage::Zero2, precision);
    Engine::new(specs, vec![], options, optimizer, comm, &mut |_, _| ()).unwrap()
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
