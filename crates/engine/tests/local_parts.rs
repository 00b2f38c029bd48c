//! Each rank reads and writes the part that its optimizer updates, and what it writes is what all
//! ranks then compute with.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::thread;

use oxizero::optim::{AdamW, LrSchedule, MomentOptions};
use oxizero::{
    Buffer, Bytes, DType, Engine, EngineError, EngineOptions, GradView, GroupOptions,
    OptimizerSetup, Overlap, ParamId, ParamSpec, Precision, Reach, Stage, UnitId, WorldSize,
};
use oxizero_comm::{Communicator, threads};

const UNIT: UnitId = UnitId(0);
const PARAM: ParamId = ParamId(1);

/// Seven bf16 elements behind one, so that no shard boundary lies at a parameter's.
fn engine(stage: Stage, comm: Box<dyn Communicator>) -> Engine {
    let spec = |name, numel| ParamSpec::new(name, &[numel], DType::Bf16, UNIT);
    let specs = vec![spec("first", 1), spec("second", 7)];
    let precision = Precision::of_model(DType::Bf16);
    let options = EngineOptions { align: Bytes(1), ..EngineOptions::new(stage, precision) };
    let optimizer = OptimizerSetup {
        rule: Box::new(AdamW::new(MomentOptions::default()).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    Engine::new(specs, vec![UNIT], options, optimizer, comm, &mut |_, _| ()).unwrap()
}

fn f32(buffer: Option<Buffer>) -> Vec<f32> {
    buffer.unwrap().f32().to_vec()
}

/// Model weights as forward reads them.
fn model(engine: &mut Engine) -> Vec<f32> {
    engine.pre_forward(UNIT).unwrap();
    let weights = engine.unit_weights(UNIT).unwrap();
    let GradView::Bf16(values) = weights.params[PARAM.0].view() else { panic!("not bf16") };
    let values = values.iter().map(|value| value.to_f32()).collect();
    drop(weights);
    engine.post_forward(UNIT).unwrap();
    values
}

fn check(stage: Stage, comm: Box<dyn Communicator>) {
    let mut engine = engine(stage, comm);
    let options = engine.options().clone();
    let rule = AdamW::new(MomentOptions::default()).unwrap();
    let reach = Reach {
        world_size: engine.communicator().world_size(),
        shares_replicas: false,
        overlap: Overlap::Off,
    };
    let planned = options.plan(engine.params(), &[UNIT], &rule, reach);
    assert_eq!(planned.unwrap(), engine.plan());
    let elements = engine.local_param(PARAM).unwrap().unwrap().elements;
    // 1.001 is 1 in bf16.
    let mine: Vec<f32> = elements.clone().map(|element| element as f32 + 1.001).collect();
    engine.set_local_param(PARAM, GradView::F32(&mine)).unwrap();
    let whole: Vec<f32> = (0..7).map(|element| element as f32 + 1.001).collect();
    assert_eq!(f32(engine.full_param(PARAM).unwrap()), whole);
    assert_eq!(model(&mut engine), (1..=7).map(|element| element as f32).collect::<Vec<_>>());
    assert_eq!(f32(engine.full_param(ParamId(0)).unwrap()), [0.0]);

    engine.set_local_state(PARAM, "exp_avg", GradView::F32(&mine)).unwrap();
    assert_eq!(f32(engine.full_state(PARAM, "exp_avg").unwrap()), whole);
    assert_eq!(f32(engine.full_state(PARAM, "exp_avg_sq").unwrap()), [0.0; 7]);
    assert_eq!(engine.local_state(PARAM, "exp_avg").unwrap().unwrap().elements, elements);

    let error = engine.set_local_param(PARAM, GradView::F32(&[0.0; 8])).unwrap_err();
    assert!(matches!(error, EngineError::WrongNumel { .. }), "{error}");
    let error = engine.set_local_state(PARAM, "momentum", GradView::F32(&mine)).unwrap_err();
    assert!(matches!(error, EngineError::UnknownState { .. }), "{error}");
}

#[test]
fn local_parts_of_weights_and_states_can_be_written() {
    for stage in Stage::ALL {
        for ranks in 1..=4 {
            thread::scope(|scope| {
                for comm in threads::group(WorldSize::new(ranks).unwrap()) {
                    scope.spawn(move || check(stage, comm));
                }
            });
        }
    }
}
