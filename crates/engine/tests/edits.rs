//! What an edit may be, and whom a step that it spoils is blamed on.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use oxizero::optim::{LrSchedule, Momentum, Sgd};
use oxizero::{
    DType, Engine, EngineError, EngineOptions, GradIn, GradView, GroupOptions, LossScale,
    OptimizerSetup, ParamId, ParamSpec, Precision, Stage, StepOutcome, UnitId, WorldSize,
};
use oxizero_comm::threads;

/// One rank, whose two parameters of one element have these gradients.
fn after_backward(precision: Precision, grads: [f32; 2]) -> Engine {
    let spec = |name| ParamSpec::new(name, &[1], precision.model, UnitId(0));
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::None).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let comm = threads::group(WorldSize::ONE).remove(0);
    let specs = vec![spec("first"), spec("second")];
    let options = EngineOptions::new(Stage::Zero2, precision);
    let mut engine = Engine::new(specs, vec![], options, optimizer, comm, &mut |_, _| ()).unwrap();
    for (index, grad) in grads.into_iter().enumerate() {
        let values = GradView::F32(std::slice::from_ref(&grad));
        engine.grad_ready(ParamId(index), GradIn { values, loss_scale: LossScale::ONE }).unwrap();
    }
    engine.backward_end().unwrap();
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
