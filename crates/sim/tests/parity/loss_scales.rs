//! Loss scales that change, and steps that are skipped or are not.

use super::*;
use oxizero_core::DynamicLossScale;

/// Some gradients overflow f16 on the way; in which steps depends on the scale, and so on what was
/// skipped before.
#[test]
fn dynamic_loss_scales_train_as_the_oracle() {
    for stage in Stage::ALL {
        for (hysteresis, consecutive_hysteresis) in [(1, false), (2, false), (2, true)] {
            for (accumulation, accumulate) in [(1, DType::F32), (2, DType::F16)] {
                let dynamic = DynamicLossScale {
                    initial: 65536.0,
                    loss_scale_window: 2,
                    hysteresis,
                    consecutive_hysteresis,
                    minimum: 1.0,
                };
                let precision = Precision { accumulate, ..Precision::of_model(DType::F16) };
                let options = EngineOptions {
                    accumulation,
                    clip_norm: Some(2.5),
                    loss_scaling: LossScaling::Dynamic(dynamic),
                    ..EngineOptions::new(stage, precision)
                };
                let trial = Trial { ranks: 3, steps: 20, warmup_steps: 8, ..model_of(options) };
                let expected = trial.oracle();
                let skipped = expected[0].outcomes.iter().filter(|norm| norm.is_none()).count();
                assert!((5..15).contains(&skipped), "{skipped} steps are skipped");
                let scales = &expected[0].loss_scales;
                assert!(scales.windows(2).any(|pair| pair[1] > pair[0]), "{scales:?}");
                assert_trains_to(&trial, &expected);
            }
        }
    }
}

/// Infinities that come as such, from one rank and for one parameter, in every other step.
#[test]
fn skipped_steps_train_as_the_oracle() {
    for stage in Stage::ALL {
        for model in [DType::Bf16, DType::F32] {
            let options = EngineOptions {
                accumulation: 2,
                ..EngineOptions::new(stage, Precision::of_model(model))
            };
            let backward = |at: At, weights: &[f32]| match (at.step % 2, at.micro, at.rank) {
                (1, 0, 2) if at.param == 2 => vec![vec![f32::NEG_INFINITY; weights.len()]],
                _ => backward(at, weights),
            };
            let trial = Trial { ranks: 3, steps: 5, backward, ..model_of(options) };
            let expected = trial.oracle();
            assert_eq!(expected[0].outcomes.iter().filter(|norm| norm.is_none()).count(), 2);
            assert_trains_to(&trial, &expected);
            assert_trains_to(&Trial { reads: Reads::None, ..trial }, &expected);
        }
    }
}

/// Where finiteness is not checked, every step is applied, and the weights show it.
#[test]
fn steps_that_are_not_checked_train_as_the_oracle() {
    for stage in Stage::ALL {
        for (bad, norm) in [
            (f32::INFINITY, Norm::Two),
            (f32::NAN, Norm::Two),
            (f32::INFINITY, Norm::Infinity),
            (f32::NAN, Norm::Infinity),
        ] {
            for clip_norm in [None, Some(2.5)] {
                let options = EngineOptions {
                    check_finite: false,
                    clip_norm,
                    norm,
                    ..EngineOptions::new(stage, Precision::of_model(DType::Bf16))
                };
                let backward = if bad.is_nan() { with_nan } else { with_infinity };
                let trial = Trial { ranks: 3, steps: 2, backward, ..model_of(options) };
                let expected = trial.oracle();
                assert!(expected[0].outcomes.iter().all(Option::is_some));
                assert!(expected[0].weights[3][0].is_nan() || clip_norm.is_none());
                assert_trains_to(&trial, &expected);
            }
        }
    }
}

fn with_nan(at: At, weights: &[f32]) -> Vec<Vec<f32>> {
    if (at.rank, at.param) == (1, 3) { vec![vec![f32::NAN]] } else { backward(at, weights) }
}

fn with_infinity(at: At, weights: &[f32]) -> Vec<Vec<f32>> {
    if (at.rank, at.param) == (1, 3) { vec![vec![f32::INFINITY]] } else { backward(at, weights) }
}
