//! Calls that are wrong, or look wrong: an error on every rank or the right numbers, never a hang,
//! a panic or something else.

use super::*;
use oxizero::{Boundary, OptimizerSetup};
use oxizero_core::{ConfigError, LossScaling};
use oxizero_optim::{Adam, AdamW, LrSchedule, MomentOptions, Optimizer};

/// What `act` returns on each rank. No rank leaves before all are done, or the others would see it
/// die.
fn each_rank<T: Send>(trial: &Trial, act: impl Fn(&mut Engine) -> T + Sync) -> Vec<T> {
    let ended = world::run(trial.ranks, |comm| {
        let mut engine = trial.start(comm).expect("the engine starts");
        (act(&mut engine), engine)
    });
    ended.into_iter().map(|(result, _)| result).collect()
}

fn rank_of(engine: &Engine) -> usize {
    engine.communicator().rank().0
}

fn give(engine: &mut Engine, param: usize, value: f32, scale: f32) -> Result<(), EngineError> {
    let loss_scale = LossScale::new(scale).expect("a scale");
    let values = GradView::F32(std::slice::from_ref(&value));
    engine.grad_ready(ParamId(param), GradIn { values, loss_scale })
}

fn scale_one(engine: &mut Engine, param: usize, value: f32) -> Result<(), EngineError> {
    give(engine, param, value, 1.0)
}

mod loss_scales {
    use super::*;

    #[test]
    fn a_scale_that_one_rank_has_is_everybodys() {
        let trial = Trial { ranks: 3, ..one_weight(Precision::of_model(F32), |_, _| vec![]) };
        for user in 0..3 {
            each_stage(&trial, |trial| {
                for (grad, outcome) in each_rank(trial, |engine| {
                    if rank_of(engine) == user {
                        give(engine, 0, 6.0 * 1024.0, 1024.0).unwrap();
                    }
                    engine.backward_end().unwrap();
                    (full_grad(engine, 0), engine.step().unwrap())
                }) {
                    assert_eq!(grad, [2.0]);
                    assert_eq!(outcome, StepOutcome::Applied { norm_before: 2.0, norm_after: 2.0 });
                }
            });
        }
    }

    #[test]
    fn scales_that_differ_are_refused_on_all_ranks() {
        let trial = Trial { ranks: 3, ..one_weight(Precision::of_model(F32), |_, _| vec![]) };
        for reads in [true, false] {
            each_stage(&trial, |trial| {
                for error in each_rank(trial, |engine| {
                    let scale = [8.0, 8.0, 4.0][rank_of(engine)];
                    give(engine, 0, 1.0, scale).unwrap();
                    let error = give(engine, 0, 1.0, 2.0).unwrap_err();
                    assert!(matches!(error, EngineError::UnexpectedGrad { .. }), "{error:?}");
                    engine.backward_end().unwrap();
                    match reads {
                        true => engine.full_grad(ParamId(0)).map(drop).unwrap_err(),
                        false => engine.step().map(drop).unwrap_err(),
                    }
                }) {
                    let EngineError::LossScalesDiffer { first, expected, second, got } = error
                    else {
                        panic!("{error:?}")
                    };
                    let (first, second) = ((first, expected), (second, got));
                    assert_eq!((first, second), ((Rank(0), 8.0), (Rank(2), 4.0)));
                }
            });
        }
    }

    /// 2 * f32::MAX, and the reciprocal of a denormal number, are not numbers of f32.
    #[test]
    fn scales_that_no_gradient_can_be_divided_by_are_refused_by_field() {
        let trial = Trial { ranks: 2, ..one_weight(Precision::of_model(F32), |_, _| vec![]) };
        for scale in [f32::MAX, 1e-42] {
            each_stage(&trial, |trial| {
                for error in each_rank(trial, |engine| {
                    give(engine, 0, 1.0, scale).unwrap();
                    engine.backward_end().unwrap();
                    engine.step().unwrap_err()
                }) {
                    assert!(error.to_string().contains("`loss_scale = "), "{error}");
                }
            });
        }
    }
}

mod order_of_calls {
    use super::*;

    /// Evaluation of a unit between the last backward and the step, which must not leave old
    /// weights behind for the next forward.
    #[test]
    fn a_forward_before_the_step_leaves_no_old_weights_behind() {
        for (model, peeks) in [(F32, true), (F32, false), (BF16, true), (BF16, false)] {
            let trial = Trial { ranks: 2, ..two_units(model, |_, _| vec![vec![1.0]]) };
            each_stage(&trial, |trial| {
                for weights in each_rank(trial, |engine| {
                    trial.micro_batch(engine, 0, 0).unwrap();
                    engine.pre_forward(UnitId(0)).unwrap();
                    if peeks {
                        engine.unit_weights(UnitId(1)).unwrap();
                    }
                    engine.post_forward(UnitId(0)).unwrap();
                    let outcome = engine.step().unwrap();
                    assert!(matches!(outcome, StepOutcome::Applied { .. }), "{outcome:?}");
                    trial.weights(engine).unwrap()
                }) {
                    assert_eq!(weights, [[-1.0], [-1.0]]);
                }
            });
        }
    }

    /// Where weights are gathered, a bucket is reduced after the backward of its unit.
    #[test]
    fn a_gradient_after_its_units_backward_is_refused() {
        let trial = Trial { ranks: 2, ..in_stage(&two_units(F32, |_, _| vec![]), Stage::Zero3) };
        for (contributions, first) in [(1, false), (2, true)] {
            let mut trial = trial.clone();
            trial.specs[1].contributions = contributions;
            for grads in each_rank(&trial, |engine| {
                engine.pre_backward(UnitId(1)).unwrap();
                if first {
                    scale_one(engine, 1, 3.0).unwrap();
                }
                engine.post_backward(UnitId(1)).unwrap();
                let error = scale_one(engine, 1, 5.0).unwrap_err();
                assert!(matches!(error, EngineError::UnexpectedGrad { .. }), "{error:?}");
                assert!(error.to_string().contains("`p1`"), "{error}");
                engine.pre_backward(UnitId(0)).unwrap();
                scale_one(engine, 0, 7.0).unwrap();
                engine.post_backward(UnitId(0)).unwrap();
                engine.backward_end().unwrap();
                [0, 1].map(|param| full_grad(engine, param))
            }) {
                assert_eq!(grads, [[7.0], [if first { 3.0 } else { 0.0 }]]);
            }
        }
    }

    #[test]
    fn a_window_that_was_read_takes_no_more() {
        let trial = Trial { ranks: 2, ..two_units(F32, |_, _| vec![vec![2.0]]) };
        each_stage(&trial, |trial| {
            for weights in each_rank(trial, |engine| {
                trial.micro_batch(engine, 0, 0).unwrap();
                assert_eq!(full_grad(engine, 1), [2.0]);
                let error = scale_one(engine, 0, 1.0).unwrap_err();
                assert!(matches!(error, EngineError::UnexpectedGrad { .. }), "{error:?}");
                let unit = UnitId(0);
                for error in [
                    engine.backward_end(),
                    engine.weigh(1.0),
                    engine.pre_backward(unit),
                    engine.post_backward(unit),
                ] {
                    let error = error.unwrap_err();
                    assert!(matches!(error, EngineError::AlreadyReduced), "{error:?}");
                }
                engine.set_boundary(Boundary::Later);
                let error = engine.step().unwrap_err();
                assert!(matches!(error, EngineError::AlreadyReduced), "{error:?}");
                engine.set_boundary(Boundary::Counted);
                engine.step().unwrap();
                trial.weights(engine).unwrap()
            }) {
                assert_eq!(weights, [[-2.0], [-2.0]]);
            }
        });
    }

    #[test]
    fn a_pass_that_was_begun_is_ended_before_the_step() {
        let trial = Trial { ranks: 2, ..two_units(F32, |_, _| vec![vec![2.0]]) };
        each_stage(&trial, |trial| {
            for weights in each_rank(trial, |engine| {
                trial.micro_batch(engine, 0, 0).unwrap();
                for unit in [1, 0].map(UnitId) {
                    engine.pre_backward(unit).unwrap();
                    engine.post_backward(unit).unwrap();
                }
                assert!(matches!(engine.step(), Err(EngineError::NoBackward)));
                engine.backward_end().unwrap();
                engine.step().unwrap();
                trial.micro_batch(engine, 0, 0).unwrap();
                engine.step().unwrap();
                trial.weights(engine).unwrap()
            }) {
                assert_eq!(weights, [[-4.0], [-4.0]]);
            }
        });
    }

    #[test]
    fn a_step_wants_a_backward() {
        let trial = one_weight(Precision::of_model(F32), |_, _| vec![vec![1.0]]);
        each_stage(&Trial { ranks: 2, ..trial }, |trial| {
            each_rank(trial, |engine| {
                for _ in 0..2 {
                    let error = engine.step().unwrap_err();
                    assert!(matches!(error, EngineError::NoBackward), "{error:?}");
                    trial.micro_batch(engine, 0, 0).unwrap();
                    engine.step().unwrap();
                }
            });
        });
    }

    /// What a pass has begun with holds until it ends: nothing is reduced twice, added in the wire
    /// dtype or forgotten. 257 is not a number of bf16.
    #[test]
    fn sync_that_changes_within_a_pass_loses_nothing() {
        let trial = summed(&Trial { ranks: 2, ..two_units(BF16, |_, _| vec![]) }, 2);
        for from in [true, false] {
            each_stage(&trial, |trial| {
                for grads in each_rank(trial, |engine| {
                    engine.set_grad_sync(from).unwrap();
                    for value in [256.0, 1.0] {
                        for param in [1, 0] {
                            engine.pre_backward(UnitId(param)).unwrap();
                            scale_one(engine, param, value / 2.0).unwrap();
                            engine.post_backward(UnitId(param)).unwrap();
                            engine.set_grad_sync(!from).unwrap();
                        }
                        engine.backward_end().unwrap();
                        if value == 256.0 {
                            engine.step().unwrap();
                        }
                    }
                    [0, 1].map(|param| full_grad(engine, param))
                }) {
                    assert_eq!(grads, [[257.0]; 2], "sync {from} first");
                }
            });
        }
    }

    #[test]
    fn a_weighted_window_that_weighs_nothing_can_still_be_weighed() {
        let mut trial = one_weight(Precision::of_model(F32), |_, _| vec![]);
        trial.options.reduction = Reduction::Weighted;
        each_stage(&Trial { ranks: 2, ..trial }, |trial| {
            for grad in each_rank(trial, |engine| {
                scale_one(engine, 0, 3.0).unwrap();
                engine.backward_end().unwrap();
                let error = engine.step().unwrap_err();
                assert!(matches!(error, EngineError::NoWeight), "{error:?}");
                for wrong in [-1.0, f64::NAN, f64::INFINITY] {
                    assert!(engine.weigh(wrong).unwrap_err().to_string().contains("weight"));
                }
                engine.weigh(2.0 * rank_of(engine) as f64).unwrap();
                full_grad(engine, 0)
            }) {
                assert_eq!(grad, [3.0]);
            }
        });
    }

    /// Wherever a window is given up, the next one is as if it had not been.
    #[test]
    fn a_window_that_was_given_up_leaves_nothing() {
        let backward: Backward = |at, weights| match at.step {
            9 => vec![vec![f32::NAN; weights.len()]],
            _ => vec![vec![1.0 + at.micro as f32]],
        };
        let mut trial = Trial { ranks: 2, ..two_units(BF16, backward) };
        trial.options.accumulation = 2;
        for sync in [true, false] {
            each_stage(&trial, |trial| {
                for weights in each_rank(trial, |engine| {
                    for stop in 0..4 {
                        engine.set_grad_sync(sync).unwrap();
                        if stop > 0 {
                            trial.pass(engine, At { step: 9, ..at(0) }).unwrap();
                        }
                        if stop > 1 {
                            engine.step().unwrap();
                            trial.pass(engine, At { step: 9, ..at(1) }).unwrap();
                        }
                        if stop > 2 {
                            engine.full_grad(ParamId(0)).unwrap();
                        }
                        if stop < 3 {
                            engine.pre_backward(UnitId(1)).unwrap();
                            scale_one(engine, 1, f32::NAN).unwrap();
                        }
                        engine.discard_window().unwrap();
                        let error = engine.step().unwrap_err();
                        assert!(matches!(error, EngineError::NoBackward), "{error:?}");
                        trial.window(engine, stop).unwrap();
                    }
                    trial.weights(engine).unwrap()
                }) {
                    assert_eq!(weights, [[-6.0], [-6.0]]);
                }
            });
        }
    }
}

mod groups;
mod ranks_that_differ;

mod numbers {
    use super::*;

    fn refusal(trial: &Trial) -> String {
        let errors = world::run(2, |comm| trial.start(comm).err());
        let error = errors[0].as_ref().expect("it is refused").to_string();
        assert!(errors.iter().all(|e| e.as_ref().is_some_and(|e| e.to_string() == error)));
        error
    }

    #[test]
    fn numbers_that_f32_does_not_have_are_refused_by_field() {
        let trial = one_weight(Precision::of_model(F32), |_, _| vec![]);
        let with = |change: &dyn Fn(&mut Trial)| {
            let mut trial = trial.clone();
            change(&mut trial);
            refusal(&trial)
        };
        assert!(with(&|trial| trial.groups[0].lr = 1e39).contains("`lr = "));
        assert!(with(&|trial| trial.groups[0].weight_decay = f64::NAN).contains("`weight_decay"));
        assert!(with(&|trial| trial.options.clip_norm = Some(1e-300)).contains("`clip_norm = "));
        for scale in [f32::NAN, 0.0, -1.0, f32::INFINITY] {
            let error = LossScale::new(scale).map(LossScaling::Fixed).unwrap_err();
            assert!(matches!(error, ConfigError::Value { field, .. } if field == "loss_scale"));
        }
    }

    #[test]
    fn parameters_larger_than_memory_are_refused_by_name() {
        let trial = one_weight(Precision::of_model(F32), |_, _| vec![]);
        let with = |change: &dyn Fn(&mut ParamSpec)| {
            let mut trial = trial.clone();
            change(&mut trial.specs[0]);
            let error = refusal(&trial);
            assert!(error.contains("parameter `w`"), "{error}");
        };
        with(&|spec| spec.unit = UnitId(usize::MAX));
        with(&|spec| spec.contributions = usize::MAX);
        with(&|spec| spec.contributions = 0);
        with(&|spec| spec.shape = vec![usize::MAX]);
        with(&|spec| spec.shape = vec![1 << 40, 1 << 40]);
        with(&|spec| spec.group = oxizero_core::OptimGroup(usize::MAX));
    }

    #[test]
    fn indices_that_the_engine_was_never_given_are_errors() {
        let trial = Trial { ranks: 2, ..one_weight(Precision::of_model(F32), |_, _| vec![]) };
        each_stage(&trial, |trial| {
            each_rank(trial, |engine| {
                for unit in [1, usize::MAX].map(UnitId) {
                    for result in [
                        engine.pre_forward(unit),
                        engine.post_forward(unit),
                        engine.pre_backward(unit),
                        engine.post_backward(unit),
                        engine.unit_weights(unit).map(drop),
                    ] {
                        let error = result.unwrap_err();
                        assert!(matches!(error, EngineError::Unknown { .. }), "{error:?}");
                    }
                }
                for param in [1, usize::MAX] {
                    let error = scale_one(engine, param, 1.0).unwrap_err();
                    assert!(matches!(error, EngineError::Unknown { .. }), "{error:?}");
                    let error = engine.full_param(ParamId(param)).unwrap_err();
                    assert!(matches!(error, EngineError::Unknown { .. }), "{error:?}");
                }
            });
        });
    }

    /// The next unit's weights are on their way when they are read.
    #[test]
    fn masters_are_read_while_weights_are_gathered() {
        let params: [(&str, &[f32]); 2] = [("p0", &[1.0, 2.0, 3.0]), ("p1", &[4.0, 5.0])];
        for model in [F32, BF16] {
            let options = options(Precision::of_model(model));
            let trial = Trial { ranks: 2, ..Trial::new(options, &params, |_, _| vec![]) };
            each_stage(&trial, |trial| {
                for (masters, weights) in each_rank(trial, |engine| {
                    engine.pre_forward(UnitId(0)).unwrap();
                    let masters = [1, 0, 1].map(|param| {
                        let master = engine.full_param(ParamId(param)).unwrap();
                        to_f32(master.expect("it is trained").view())
                    });
                    let weights = engine.unit_weights(UnitId(0)).unwrap();
                    (masters, to_f32(weights.params[0].view()))
                }) {
                    assert_eq!(masters, [vec![4.0, 5.0], vec![1.0, 2.0, 3.0], vec![4.0, 5.0]]);
                    assert_eq!(weights, [1.0, 2.0, 3.0]);
                }
            });
        }
    }
}
