//! Gradients that are read as a whole.

use super::*;
use oxizero_device::ViewMut as GradViewMut;

#[test]
fn gradients_are_there_between_the_last_backward_and_the_step() {
    let mut trial = one_weight(Precision::of_model(BF16), |_, _| vec![vec![2.0]]);
    trial.options.accumulation = 2;
    each_stage(&Trial { ranks: 2, ..trial }, |trial| {
        world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            let read = |engine: &mut Engine| engine.full_grad(ParamId(0));
            for _ in 0..2 {
                let error = read(&mut engine).unwrap_err();
                let started = engine.applied_steps() > 0;
                assert_eq!(matches!(error, EngineError::Consumed), started, "{error:?}");
                assert_eq!(matches!(error, EngineError::NotReady), !started, "{error:?}");
                trial.micro_batch(&mut engine, 0, 0).unwrap();
                let error = read(&mut engine).unwrap_err();
                assert!(matches!(error, EngineError::MidWindow { n: 1, of: 2 }), "{error:?}");
                engine.step().unwrap();
                let error = read(&mut engine).unwrap_err();
                assert!(matches!(error, EngineError::MidWindow { n: 1, of: 2 }), "{error:?}");
                trial.micro_batch(&mut engine, 0, 1).unwrap();
                for _ in 0..2 {
                    assert_eq!(full_grad(&mut engine, 0), [2.0]);
                }
                engine.step().unwrap();
            }
        });
    });
}

#[test]
fn frozen_empty_and_unused_parameters_have_none_an_empty_one_and_zeros() {
    let params: [(&str, &[f32]); 4] =
        [("frozen", &[1.0]), ("empty", &[]), ("unused", &[1.0, 2.0]), ("used", &[3.0])];
    let backward: Backward = |at, weights| match at.param {
        1 | 3 => vec![vec![1.0; weights.len()]],
        _ => vec![],
    };
    let mut trial = Trial::new(options(Precision::of_model(BF16)), &params, backward);
    trial.specs[0].trainable = false;
    trial.specs[1].shape = vec![0, 8];
    each_stage(&trial, |trial| {
        for grads in world::run(3, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            [0, 1, 2, 3].map(|param| {
                let grad = engine.full_grad(ParamId(param)).unwrap();
                grad.map(|grad| to_f32(grad.view()))
            })
        }) {
            assert_eq!(grads, [None, Some(vec![]), Some(vec![0.0; 2]), Some(vec![1.0])]);
        }
    });
}

#[test]
fn five_elements_of_three_ranks_are_read_whole() {
    let params: [(&str, &[f32]); 1] = [("w", &[0.0; 5])];
    let backward: Backward = |_, _| vec![vec![3.0, 6.0, 9.0, 12.0, 15.0]];
    let trial = Trial::new(options(Precision::of_model(F32)), &params, backward);
    everywhere(&Trial { ranks: 3, ..trial }, |trained| {
        assert_eq!(trained.grads[0], [[3.0, 6.0, 9.0, 12.0, 15.0]]);
        assert_eq!(trained.weights, [[-3.0, -6.0, -9.0, -12.0, -15.0]]);
    });
}

/// In one bucket of two shards, each parameter lies in one of them.
#[test]
fn a_parameter_that_another_rank_owns_is_read_whole_and_by_all() {
    let params: [(&str, &[f32]); 2] = [("p0", &[0.0; 3]), ("p1", &[0.0; 3])];
    let backward: Backward = |at, _| vec![[1.0, 2.0, 3.0].map(|g| g + at.param as f32).to_vec()];
    let mut trial = Trial::new(options(Precision::of_model(F32)), &params, backward);
    trial.specs[1].unit = UnitId(0);
    for stage in Stage::ALL {
        let trial = in_stage(&trial, stage);
        let (grads, logs) = world::run_watched(2, Plan::default(), |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            [0, 1].map(|param| full_grad(&mut engine, param))
        });
        assert_eq!(grads, [[[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]; 2]);
        assert_eq!(logs[0].operations(), logs[1].operations());
    }
}

#[test]
fn a_parameter_that_the_engine_was_never_given_is_named_and_harms_no_other() {
    let trial = Trial { ranks: 2, ..one_weight(Precision::of_model(BF16), |_, _| vec![vec![1.0]]) };
    each_stage(&trial, |trial| {
        world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            for param in [1, usize::MAX] {
                let error = engine.full_grad(ParamId(param)).unwrap_err();
                assert!(matches!(error, EngineError::Unknown { .. }), "{error:?}");
                assert!(error.to_string().contains(&format!("no parameter {param}")), "{error}");
            }
            assert_eq!(full_grad(&mut engine, 0), [1.0]);
            assert!(matches!(engine.step().unwrap(), StepOutcome::Applied { .. }));
        });
    });
}

/// A bucket of each dtype, and one that is frozen.
#[test]
fn a_models_gradients_are_read_in_one_collective_a_dtype() {
    let names: Vec<_> = (0..1000).map(|index| format!("p{index}")).collect();
    let params: Vec<_> = names.iter().map(|name| (name.as_str(), &[0.0; 3][..])).collect();
    let precision = Precision { accumulate: BF16, ..Precision::of_model(BF16) };
    let backward: Backward = |at, _| vec![vec![at.param as f32 % 32.0; 3]];
    let mut trial = Trial::new(options(precision), &params, backward);
    for spec in trial.specs.iter_mut().filter(|spec| spec.unit.0 % 10 == 0) {
        spec.dtype = F32;
    }
    trial.specs[17].trainable = false;
    for stage in [Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        let trial = in_stage(&trial, stage);
        let run = |reads: bool| {
            let (_, logs) = world::run_watched(2, Plan::default(), |comm| {
                let mut engine = trial.start(comm).unwrap();
                trial.micro_batch(&mut engine, 0, 0).unwrap();
                let grads = reads.then(|| engine.full_grads(Scope::DataParallel).unwrap());
                for (index, _) in names.iter().enumerate().filter(|_| reads) {
                    let grad = grads.as_ref().unwrap().get(ParamId(index));
                    let right = (index != 17).then(|| vec![index as f32 % 32.0; 3]);
                    assert_eq!(grad.map(to_f32), right);
                }
                engine.step().unwrap();
            });
            logs.iter().map(|log| log.count(Kind::AllGather)).collect::<Vec<_>>()
        };
        let without = run(false);
        assert_eq!(run(true), without.iter().map(|count| count + 2).collect::<Vec<_>>());
    }
}

#[test]
fn what_is_set_to_what_it_is_stays_and_twice_the_gradient_moves_twice_as_far() {
    let params: [(&str, &[f32]); 2] = [("p0", &[0.0; 5]), ("p1", &[0.0; 2])];
    let backward: Backward =
        |at, weights| vec![(0..weights.len()).map(|i| (1 + i + at.rank) as f32).collect()];
    let trial = Trial::new(options(Precision::of_model(F32)), &params, backward);
    each_stage(&Trial { ranks: 3, ..trial }, |trial| {
        for (before, after, weights) in world::run(3, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            let read = |engine: &mut Engine| [0, 1].map(|param| full_grad(engine, param));
            let before = read(&mut engine);
            for (param, grad) in before.iter().enumerate() {
                engine.set_full_grad(ParamId(param), GradView::F32(grad)).unwrap();
            }
            let after = read(&mut engine);
            for (param, grad) in before.iter().enumerate() {
                let twice: Vec<_> = grad.iter().map(|grad| 2.0 * grad).collect();
                engine.set_full_grad(ParamId(param), GradView::F32(&twice)).unwrap();
            }
            engine.step().unwrap();
            (before, after, trial.weights(&mut engine).unwrap())
        }) {
            assert_eq!(before, [vec![2.0, 3.0, 4.0, 5.0, 6.0], vec![2.0, 3.0]]);
            assert_eq!(after, before);
            assert_eq!(weights, [vec![-4.0, -6.0, -8.0, -10.0, -12.0], vec![-4.0, -6.0]]);
        }
    });
}

/// Each rank's part is taken from the values that it passed.
#[test]
fn each_rank_sets_its_own_part() {
    let params: [(&str, &[f32]); 1] = [("w", &[0.0; 4])];
    let trial = Trial::new(options(Precision::of_model(F32)), &params, |_, _| vec![]);
    for stage in [Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        let trial = in_stage(&trial, stage);
        for grad in world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            let values = [1.0 + engine.communicator().rank().0 as f32; 4];
            engine.set_full_grad(ParamId(0), GradView::F32(&values)).unwrap();
            full_grad(&mut engine, 0)
        }) {
            assert_eq!(grad, [1.0, 1.0, 2.0, 2.0]);
        }
    }
}

/// The norm is that of the gradient as it was left, however it was edited.
#[test]
fn half_the_gradient_has_half_the_norm() {
    let params: [(&str, &[f32]); 2] = [("p0", &[0.0; 3]), ("p1", &[0.0; 1])];
    let backward: Backward = |at, weights| vec![vec![[2.0, 2.0][at.param]; weights.len()]];
    let trial = Trial::new(options(Precision::of_model(BF16)), &params, backward);
    each_stage(&Trial { ranks: 2, ..trial }, |trial| {
        for (norms, outcome, weights) in world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            let mut norms = vec![engine.grad_norms().unwrap()];
            engine
                .map_grads(|param, _, values| {
                    let GradViewMut::F32(values) = values else { panic!("f32 was asked for") };
                    values.iter_mut().for_each(|value| *value *= [1.0, 0.5][param.0]);
                })
                .unwrap();
            norms.push(engine.grad_norms().unwrap());
            let local = engine.local_grad(ParamId(0)).unwrap().expect("it is trained");
            let half: Vec<_> = to_f32(local.values()).iter().map(|value| value / 2.0).collect();
            engine.set_local_grad(ParamId(0), GradView::F32(&half)).unwrap();
            norms.push(engine.grad_norms().unwrap());
            let outcome = engine.step().unwrap();
            (norms, outcome, trial.weights(&mut engine).unwrap())
        }) {
            let p0 = |value: f64| Some((3.0 * value * value).sqrt());
            assert_eq!(
                norms,
                [vec![p0(2.0), Some(2.0)], vec![p0(2.0), Some(1.0)], vec![p0(1.0), Some(1.0)]]
            );
            assert_eq!(outcome, StepOutcome::Applied { norm_before: 2.0, norm_after: 2.0 });
            assert_eq!(weights, [vec![-1.0; 3], vec![-1.0]]);
        }
    });
}
