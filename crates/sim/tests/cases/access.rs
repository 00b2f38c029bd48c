//! Gradients that are read as a whole.

use super::*;

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
