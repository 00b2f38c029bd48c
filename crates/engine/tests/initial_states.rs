//! What optimizer states are before the first step.

use oxizero::optim::{Adagrad, AdagradOptions, LrSchedule};
use oxizero::{
    DType, Engine, EngineOptions, GradIn, GradView, GroupOptions, LossScale, OptimizerSetup,
    ParamId, ParamSpec, Precision, Stage, UnitId, WorldSize,
};
use oxizero_comm::threads;

#[test]
fn states_start_where_their_rule_says() {
    let precision = Precision::of_model(DType::Bf16);
    let specs = vec![ParamSpec::new("weight", &[3], precision.model, UnitId(0))];
    let options = AdagradOptions { initial_sum: 9.0, ..AdagradOptions::default() };
    let optimizer = OptimizerSetup {
        rule: Box::new(Adagrad::new(options).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let comm = threads::group(WorldSize::ONE).remove(0);
    let options = EngineOptions::new(Stage::Zero2, precision);
    let mut engine = Engine::new(specs, vec![], options, optimizer, comm, &mut |_, _| ()).unwrap();
    let mut state = || engine.full_state(ParamId(0), "sum").unwrap().unwrap().f32().to_vec();
    assert_eq!(state(), [9.0; 3]);
    let values = GradView::F32(&[4.0, 0.0, 4.0]);
    engine.grad_ready(ParamId(0), GradIn { values, loss_scale: LossScale::ONE }).unwrap();
    engine.backward_end().unwrap();
    engine.step().unwrap();
    let weights = engine.full_param(ParamId(0)).unwrap().unwrap();
    assert_eq!(weights.f32(), [-0.8, 0.0, -0.8]);
}
