//! Looking at gradients changes no bit of the step that follows, not even where they accumulate in
//! a dtype that would round the quotient.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::thread;

use oxizero::{
    Buffer, DType, Engine, EngineOptions, GradIn, GradView, GroupOptions, LossScale,
    OptimizerSetup, ParamId, ParamSpec, Precision, Scope, Stage, UnitId, WorldSize,
};
use oxizero_comm::{Communicator, threads};
use oxizero_optim::{LrSchedule, Momentum, Sgd};

const PARAM: ParamId = ParamId(0);
const WIDE: ParamId = ParamId(1);

/// Two ranks average 1 and 1.0078125 over three micro-batches, in accumulators of bf16 and, for a
/// parameter of that dtype, of f32.
fn trained(stage: Stage, comm: Box<dyn Communicator>, look: impl FnOnce(&mut Engine)) -> Vec<f32> {
    let spec = |name, dtype| ParamSpec::new(name, &[3], dtype, UnitId(0));
    let specs = vec![spec("p", DType::Bf16), spec("wide", DType::F32)];
    let precision = Precision { accumulate: DType::Bf16, ..Precision::of_model(DType::Bf16) };
    let options = EngineOptions { accumulation: 3, ..EngineOptions::new(stage, precision) };
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::None).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let rank = comm.rank().0;
    let mut engine = Engine::new(specs, vec![], options, optimizer, comm, &mut |_, _| ()).unwrap();
    for micro in 0..3 {
        let values = [[1.0, 1.0078125][rank]; 3];
        let grad = GradIn { values: GradView::F32(&values), loss_scale: LossScale::ONE };
        engine.grad_ready(PARAM, grad).unwrap();
        engine.grad_ready(WIDE, grad).unwrap();
        engine.backward_end().unwrap();
        if micro < 2 {
            engine.step().unwrap();
        }
    }
    look(&mut engine);
    engine.step().unwrap();
    let weights = [PARAM, WIDE].map(|param| engine.full_param(param).unwrap());
    weights.iter().flatten().flat_map(Buffer::f32).copied().collect()
}

#[test]
fn a_step_after_a_look_gives_the_same_bits() {
    let looks: [fn(&mut Engine); 5] = [
        |_| (),
        |engine| assert!(engine.local_grad(WIDE).unwrap().is_some()),
        |engine| assert!(engine.full_grad(PARAM).unwrap().is_some()),
        |engine| assert!(engine.full_grads(Scope::Global).unwrap().get(PARAM).is_some()),
        |engine| assert!(engine.grad_norms().unwrap()[0] > Some(1.0)),
    ];
    for stage in Stage::ALL {
        thread::scope(|scope| {
            for comm in threads::group(WorldSize::new(2).unwrap()) {
                scope.spawn(move || {
                    let world = oxizero_core::ProcessGroup::world(comm.world_size());
                    let after =
                        |look: fn(&mut Engine)| trained(stage, comm.split(&world).unwrap(), look);
                    let [unseen, seen @ ..] = looks.map(after);
                    assert!(seen.iter().all(|seen| *seen == unseen), "{stage:?} {unseen:?}");
                });
            }
        });
    }
}
