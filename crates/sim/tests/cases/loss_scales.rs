//! Loss scales: who unscales what, and when they change.

use super::*;
use oxizero_core::{DynamicLossScale, LossScaling};

/// Changes at once, in either direction.
const EAGER: DynamicLossScale = DynamicLossScale {
    initial: 65536.0,
    loss_scale_window: 1,
    hysteresis: 1,
    consecutive_hysteresis: false,
    minimum: 1.0,
};

fn dynamic(trial: Trial, dynamic: DynamicLossScale) -> Trial {
    let loss_scaling = LossScaling::Dynamic(dynamic);
    Trial { options: EngineOptions { loss_scaling, ..trial.options }, ..trial }
}

#[test]
fn a_gradient_is_divided_by_the_scale_it_was_computed_under() {
    let params: [(&str, &[f32]); 1] = [("w", &[0.0; 2])];
    let options = options(Precision::of_model(F32));
    let trial = Trial::new(options, &params, |_, _| vec![vec![3.0, 4.0]]);
    let trial = dynamic(Trial { ranks: 2, steps: 3, ..trial }, EAGER);
    everywhere(&trial, |trained| {
        assert_eq!(trained.outcomes, [Some(5.0); 3]);
        assert_eq!(trained.loss_scales, [131_072.0, 262_144.0, 524_288.0]);
        assert_eq!(trained.weights, [[-9.0, -12.0]]);
    });
}

#[test]
fn a_step_in_which_the_scale_grows_applies_the_whole_gradient() {
    let trial = one_weight(Precision::of_model(F16), |_, _| vec![vec![8.0]]);
    let trial = dynamic(trial, DynamicLossScale { initial: 1024.0, ..EAGER });
    everywhere(&trial, |trained| {
        assert_eq!((&trained.weights, &trained.loss_scales), (&vec![vec![-8.0]], &vec![2048.0]));
    });
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale() {
    let backward: Backward =
        |at, _| vec![vec![if (at.rank, at.step) == (1, 1) { 1e30 } else { 0.25 }; 3]];
    let params: [(&str, &[f32]); 1] = [("w", &[1.0, 2.0, 3.0])];
    let trial = Trial::new(options(Precision::of_model(F16)), &params, backward);
    let slow = DynamicLossScale { loss_scale_window: 100, ..EAGER };
    let trial = dynamic(Trial { ranks: 2, warmup_steps: 4, ..trial }, slow);
    each_stage(&trial, |trial| {
        for (outcome, before, after) in world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.window(&mut engine, 0).unwrap();
            let state = |engine: &mut Engine| {
                let weights = trial.weights(engine).unwrap();
                (weights, engine.lr(0).unwrap(), engine.applied_steps())
            };
            let before = (state(&mut engine), engine.loss_scale().get());
            let (outcome, _) = trial.window(&mut engine, 1).unwrap();
            (outcome, before, (state(&mut engine), engine.loss_scale().get()))
        }) {
            assert!(matches!(outcome, StepOutcome::Skipped { .. }), "{outcome:?}");
            assert_eq!(before.0, (vec![vec![0.9375, 1.9375, 2.9375]], 0.5, 1));
            assert_eq!(after.0, before.0);
            assert_eq!((before.1, after.1), (65536.0, 32768.0));
        }
    });
}

#[test]
fn hysteresis_lets_one_overflow_pass_and_the_minimum_is_an_error_with_advice() {
    let trial = one_weight(Precision::of_model(F16), |_, _| vec![vec![f32::INFINITY]]);
    let trial = dynamic(
        Trial { ranks: 2, ..trial },
        DynamicLossScale { initial: 4.0, minimum: 2.0, hysteresis: 2, ..EAGER },
    );
    each_stage(&trial, |trial| {
        for (scales, error, weights) in world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            let scales = [0, 1].map(|step| {
                trial.window(&mut engine, step).unwrap();
                engine.loss_scale().get()
            });
            let error = trial.window(&mut engine, 2).unwrap_err();
            (scales, error, trial.weights(&mut engine).unwrap())
        }) {
            assert_eq!(scales, [4.0, 2.0]);
            assert!(matches!(error, EngineError::LossScale(_)), "{error:?}");
            assert!(error.to_string().contains("lower the learning rate"), "{error}");
            assert_eq!(weights, [[0.0]]);
        }
    });
}

#[test]
fn scales_that_cannot_be_are_refused_by_field() {
    let trial = one_weight(Precision::of_model(F16), |_, _| vec![]);
    for (wrong, field) in [
        (DynamicLossScale { initial: f32::NAN, ..EAGER }, "loss_scale.initial"),
        (DynamicLossScale { initial: -1.0, ..EAGER }, "loss_scale.initial"),
        (DynamicLossScale { loss_scale_window: 0, ..EAGER }, "loss_scale.loss_scale_window"),
    ] {
        let trial = dynamic(trial.clone(), wrong);
        for error in world::run(2, |comm| trial.start(comm).err()) {
            let error = error.expect("it is refused").to_string();
            assert!(error.contains(field), "{error}");
        }
    }
}

/// Nobody would ever halve the scale.
#[test]
fn a_dynamic_scale_without_finite_checks_is_refused() {
    let mut trial = dynamic(one_weight(Precision::of_model(F16), |_, _| vec![]), EAGER);
    trial.options.check_finite = false;
    for error in world::run(2, |comm| trial.start(comm).err()) {
        let error = error.expect("it is refused").to_string();
        assert!(error.contains("check_finite") && error.contains("loss_scal"), "{error}");
    }
}
