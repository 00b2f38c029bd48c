//! A tied parameter is one parameter under all its names.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use oxizero::optim::{LrSchedule, Momentum, Sgd};
use oxizero::{
    DType, Engine, EngineError, EngineOptions, GradIn, GradView, GroupOptions, LossScale,
    OptimizerSetup, ParamId, ParamSpec, Precision, Scope, Stage, UnitId, WorldSize,
};
use oxizero_comm::threads;

fn engine(specs: Vec<ParamSpec>) -> Result<Engine, EngineError> {
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::None).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let options = EngineOptions::new(Stage::Zero2, Precision::of_model(DType::F32));
    let comm = threads::group(WorldSize::ONE).remove(0);
    Engine::new(specs, vec![], options, optimizer, comm, &mut |_, _| ())
}

fn embedding() -> ParamSpec {
    ParamSpec {
        aliases: vec!["head".into()],
        contributions: 2,
        ..ParamSpec::new("embedding", &[1], DType::F32, UnitId(0))
    }
}

#[test]
fn a_tied_gradient_is_there_under_both_names() {
    let other = ParamSpec::new("norm", &[1], DType::F32, UnitId(0));
    let mut engine = engine(vec![other, embedding()]).unwrap();
    for grad in [[1.0], [2.0]] {
        let values = GradView::F32(&grad);
        let grad = GradIn { values, loss_scale: LossScale::ONE };
        engine.grad_ready(engine.param("head").unwrap(), grad).unwrap();
    }
    engine.backward_end().unwrap();
    let grads = engine.full_grads(Scope::DataParallel).unwrap();
    for name in ["embedding", "head"] {
        let param = grads.param(name).unwrap();
        assert_eq!((param, engine.param(name).unwrap()), (ParamId(1), ParamId(1)));
        assert!(matches!(grads.get(param), Some(GradView::F32([3.0]))));
    }
    let [there, here] = [grads.param("tail"), engine.param("tail")];
    for error in [there.unwrap_err(), here.unwrap_err()] {
        assert!(error.to_string().contains("`tail`"), "{error}");
    }
}

#[test]
fn a_name_is_given_once() {
    let taken = ParamSpec::new("head", &[1], DType::F32, UnitId(0));
    let error = engine(vec![embedding(), taken]).map(drop).unwrap_err();
    assert!(error.to_string().contains("`head` is taken"), "{error}");
}
