//! Weights that a framework's tensors alias, and hyper-parameters that change between steps.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::thread;

use oxizero::{
    Engine, EngineError, EngineOptions, GradIn, GradView, GroupOptions, OptimizerSetup, View,
};
use oxizero_comm::{Communicator, threads};
use oxizero_core::{
    DType, LossScale, OptimGroup, ParamId, ParamSpec, Precision, Stage, UnitId, WorldSize,
};
use oxizero_optim::{AdamW, LrSchedule, MomentOptions, Momentum, Optimizer, Sgd};

const NUMELS: [usize; 2] = [5, 70];

fn engine(stage: Stage, dtype: DType, comm: Box<dyn Communicator>) -> Engine {
    let spec = |(index, numel): (usize, &usize)| ParamSpec {
        group: OptimGroup(index),
        ..ParamSpec::new(format!("p{index}"), &[*numel], dtype, UnitId(0))
    };
    let specs = NUMELS.iter().enumerate().map(spec).collect();
    let options = EngineOptions::new(stage, Precision::of_model(dtype));
    let optimizer = OptimizerSetup {
        rule: Box::new(Sgd::new(Momentum::None).unwrap()),
        groups: vec![GroupOptions { lr: 1.0, weight_decay: 0.0 }; 2],
        schedule: LrSchedule::constant(0),
    };
    let initial = &mut |_, weights: &mut [f32]| weights.fill(64.0);
    Engine::new(specs, vec![], options, optimizer, comm, initial).unwrap()
}

fn world(stage: Stage, dtype: DType, ranks: usize, test: impl Fn(Engine) + Sync) {
    thread::scope(|scope| {
        for comm in threads::group(WorldSize::new(ranks).unwrap()) {
            scope.spawn(|| test(engine(stage, dtype, comm)));
        }
    });
}

/// Whole gradients of 1 for both parameters.
fn backward(engine: &mut Engine) {
    for (index, numel) in NUMELS.iter().enumerate() {
        let values = vec![1.0; *numel];
        let grad = GradIn { values: GradView::F32(&values), loss_scale: LossScale::ONE };
        engine.grad_ready(ParamId(index), grad).unwrap();
    }
    engine.backward_end().unwrap();
}

fn masters(engine: &mut Engine, param: usize) -> Vec<f32> {
    engine.full_param(ParamId(param)).unwrap().unwrap().f32().to_vec()
}

#[test]
fn lent_weights_stay_where_they_are() {
    for stage in [Stage::Zero0, Stage::Zero1, Stage::Zero2] {
        world(stage, DType::Bf16, 3, |mut engine| {
            let start = |engine: &mut Engine| {
                let lent = engine.lend_weights(ParamId(1)).unwrap();
                assert_eq!((lent.bytes.len(), lent.shape), (140, vec![70]));
                (lent.memory.start().addr(), lent.bytes.start)
            };
            let before = start(&mut engine);
            for _ in 0..2 {
                backward(&mut engine);
                engine.step().unwrap();
            }
            engine.set_full_param(ParamId(1), View::F32(&[2.0; 70])).unwrap();
            assert_eq!(start(&mut engine), before);
        });
    }
}

#[test]
fn sharded_weights_are_not_lent() {
    world(Stage::Zero3, DType::F32, 2, |mut engine| {
        let error = engine.lend_weights(ParamId(0)).unwrap_err().to_string();
        assert!(error.contains("`p0`") && error.contains("stage 0, 1 or 2"), "{error}");
    });
}

#[test]
fn masters_keep_their_precision_where_the_borrower_wrote_nothing() {
    for stage in [Stage::Zero0, Stage::Zero1, Stage::Zero2] {
        world(stage, DType::Bf16, 2, |mut engine| {
            // A master of 63.99 lies beside a model weight of 64, to which it is rounded.
            engine.set_full_param(ParamId(1), View::F32(&[63.99; 70])).unwrap();
            engine.take_over_weights(ParamId(1)).unwrap();
            assert_eq!(masters(&mut engine, 1), [63.99; 70]);
        });
    }
}

#[test]
fn a_group_changes_between_steps() {
    world(Stage::Zero2, DType::F32, 2, |mut engine| {
        backward(&mut engine);
        let group = GroupOptions { lr: 0.5, weight_decay: 0.25 };
        engine.set_group(OptimGroup(1), group).unwrap();
        assert_eq!((engine.lr(0), engine.lr(1)), (Some(1.0), Some(0.5)));
        engine.step().unwrap();
        assert_eq!(masters(&mut engine, 0), [63.0; 5]);
        assert_eq!(masters(&mut engine, 1), [64.0 - 0.5 * 17.0; 70]);
        let wrong = GroupOptions { lr: -1.0, ..group };
        assert!(engine.set_group(OptimGroup(0), wrong).unwrap_err().to_string().contains("`lr"));
        assert!(
            engine.set_group(OptimGroup(2), group).unwrap_err().to_string().contains("group 2")
        );
    });
}

#[test]
fn a_group_takes_a_rule_of_its_own_that_keeps_the_same_states() {
    #[derive(Debug)]
    struct Doubled(Sgd);
    impl Optimizer for Doubled {
        fn description(&self) -> String {
            format!("twice {}", self.0.description())
        }

        fn state_names(&self) -> &'static [&'static str] {
            self.0.state_names()
        }

        fn update(
            &self,
            hyper: oxizero_optim::Hyper,
            step: u64,
            grad: oxizero_optim::Gradient<'_>,
            weights: oxizero_optim::Weights<'_>,
        ) {
            let hyper = oxizero_optim::Hyper { lr: 2.0 * hyper.lr, ..hyper };
            self.0.update(hyper, step, grad, weights);
        }
    }
    world(Stage::Zero1, DType::F32, 2, |mut engine| {
        let adam = Box::new(AdamW::new(MomentOptions::default()).unwrap());
        let error = engine.set_rule(OptimGroup(1), adam).unwrap_err();
        assert!(matches!(error, EngineError::UnknownState { .. }), "{error}");
        let doubled = Doubled(Sgd::new(Momentum::None).unwrap());
        engine.set_rule(OptimGroup(1), Box::new(doubled)).unwrap();
        backward(&mut engine);
        engine.step().unwrap();
        assert_eq!(
            (masters(&mut engine, 0), masters(&mut engine, 1)),
            (vec![63.0; 5], vec![62.0; 70])
        );
    });
}

#[test]
fn ranks_that_would_step_differently_are_told_and_may_step_again() {
    world(Stage::Zero1, DType::F32, 3, |mut engine| {
        backward(&mut engine);
        let group = GroupOptions { lr: 0.5, weight_decay: 0.0 };
        if engine.communicator().rank().0 == 2 {
            engine.set_group(OptimGroup(0), group).unwrap();
        }
        let error = engine.step().unwrap_err();
        assert!(matches!(error, EngineError::HyperDiffers { rank } if rank.0 == 2), "{error}");
        engine.set_group(OptimGroup(0), group).unwrap();
        engine.step().unwrap();
        assert_eq!(masters(&mut engine, 0), [63.5; 5]);
    });
}
