//! Every stage trains exactly as the oracle does, whatever else is chosen.
//!
//! Weights, gradients and loss scales are compared to the bit, in every step, on every rank; norms
//! to 1e-12, for they add in f64 in another order.

mod drawn;
mod groups;
mod loss_scales;
mod opaque;
mod windows;

use std::time::Duration;

use oxizero::{EngineOptions, GroupOptions, Norm, Reduction};
use oxizero_core::{
    Bucketing, Bytes, DType, LossScale, LossScaling, Overlap, Precision, Random, Stage,
};
use oxizero_sim::odd::{ADAGRAD, ADAM, ADAMW, LION, SGD, backward, model_of};
use oxizero_sim::oracle::Rule;
use oxizero_sim::trial::{At, Ends, Reads, Trained, Trial};
use oxizero_sim::watched::{Delays, Plan};
use oxizero_sim::{first_difference, world};

#[test]
fn stage_0_trains_as_the_oracle() {
    each_choice(Stage::Zero0);
}

#[test]
fn stage_1_trains_as_the_oracle() {
    each_choice(Stage::Zero1);
}

#[test]
fn stage_2_trains_as_the_oracle() {
    each_choice(Stage::Zero2);
}

#[test]
fn stage_3_trains_as_the_oracle() {
    each_choice(Stage::Zero3);
}

/// Ranks x accumulation x clipping x dtype x bucket sizes; the rule changes along the way.
fn each_choice(stage: Stage) {
    let mut rules = [ADAMW, ADAM, SGD, LION, ADAGRAD].into_iter().cycle();
    for ranks in 1..=4 {
        for accumulation in 1..=3 {
            for clip_norm in [None, Some(2.5)] {
                for model in [DType::Bf16, DType::F32] {
                    let options = EngineOptions {
                        accumulation,
                        clip_norm,
                        align: Bytes(if ranks % 2 == 0 { 1 } else { 64 }),
                        ..EngineOptions::new(stage, Precision::of_model(model))
                    };
                    let rule = rules.next().expect("a cycle does not end");
                    assert_parity_in_every_bucketing(&Trial { ranks, rule, ..model_of(options) });
                }
            }
        }
    }
}

#[test]
fn every_precision_trains_as_the_oracle() {
    use DType::{Bf16, F16, F32};
    let choices = [
        (Bf16, F32, F32),
        (Bf16, Bf16, Bf16),
        (Bf16, F16, F32),
        (F16, F16, F32),
        (F16, F16, F16),
        (F32, Bf16, F32),
    ];
    for (model, reduce, accumulate) in choices {
        for stage in Stage::ALL {
            for accumulation in [1, 2] {
                let precision = Precision { reduce, accumulate, ..Precision::of_model(model) };
                let options =
                    EngineOptions { accumulation, ..EngineOptions::new(stage, precision) };
                assert_parity(&Trial { ranks: 3, ..model_of(options) });
            }
        }
    }
}

#[test]
fn sums_and_loss_scales_train_as_the_oracle() {
    let choices = [(Reduction::Sum, 1.0), (Reduction::Mean, 1024.0), (Reduction::Sum, 3.0)];
    for stage in Stage::ALL {
        for (reduction, loss_scale) in choices {
            let options = EngineOptions {
                reduction,
                accumulation: 2,
                clip_norm: Some(1.0),
                loss_scaling: LossScaling::Fixed(LossScale::new(loss_scale).expect("a scale")),
                ..EngineOptions::new(stage, Precision::of_model(DType::Bf16))
            };
            assert_parity(&Trial { ranks: 2, ..model_of(options) });
        }
    }
}

#[test]
fn larger_and_odd_worlds_train_as_the_oracle() {
    for stage in Stage::ALL {
        for ranks in [5, 6, 7, 9] {
            let options = EngineOptions {
                clip_norm: Some(2.5),
                bucketing: Bucketing::Bytes(Bytes(200)),
                ..EngineOptions::new(stage, Precision::of_model(DType::Bf16))
            };
            assert_parity(&Trial { ranks, ..model_of(options) });
        }
    }
}

/// Gradients of every size down to the smallest denormals, in and out of what counts as zero.
#[test]
fn tiny_gradients_train_as_the_oracle() {
    fn tiny(at: At, weights: &[f32]) -> Vec<Vec<f32>> {
        let path = [at.step, at.rank, at.param].map(|part| part as u64);
        let mut random = Random::for_path(3, &path);
        let sizes = (0..weights.len()).map(|index| 2_f32.powi(-(index as i32 / 2)));
        vec![sizes.map(|size| random.normal() * size).collect()]
    }
    for stage in [Stage::Zero0, Stage::Zero3] {
        // Next to an eps this small, even the smallest second moment shows in the weights.
        let bare = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-30 };
        for rule in [bare, ADAMW, ADAM, SGD, LION, ADAGRAD] {
            for clip_norm in [None, Some(1.0)] {
                let precision = Precision::of_model(DType::F32);
                let options = EngineOptions { clip_norm, ..EngineOptions::new(stage, precision) };
                let params: [(&str, &[f32]); 2] = [("a", &[0.0; 300]), ("b", &[1e-30; 300])];
                let trial = Trial { rule, ranks: 3, ..Trial::new(options, &params, tiny) };
                let groups = vec![GroupOptions { lr: 0.0314, weight_decay: 0.1 }];
                assert_parity(&Trial { steps: 6, groups, ..trial });
            }
        }
    }
}

/// Where ranks read one copy of the weights, each writes its own part between two barriers.
#[test]
fn shared_weights_train_as_the_oracle() {
    for stage in Stage::ALL {
        for model in [DType::Bf16, DType::F32] {
            for ranks in 1..=4 {
                let precision = Precision::of_model(model);
                let options = EngineOptions {
                    accumulation: 2,
                    clip_norm: Some(2.5),
                    ..EngineOptions::new(stage, precision)
                };
                let trial = Trial { ranks, ..model_of(options) };
                let expected = trial.oracle();
                for overlap in [Overlap::Off, Overlap::On] {
                    let train = |comm| trial.engine(world::placed(comm, overlap));
                    let ended = world::run_shared(ranks, |comm| train(comm).map(|(t, _)| t));
                    let ended = ended.expect("the ranks find each other");
                    for (trained, expected) in ended.into_iter().zip(&expected) {
                        let trained = trained.expect("nothing fails");
                        let context = format!("{stage:?} {model} of {ranks}, {overlap:?}");
                        assert_same(&trial, &trained, expected, &context);
                    }
                }
            }
        }
    }
}

#[test]
fn delays_change_nothing() {
    for stage in Stage::ALL {
        let precision = Precision::of_model(DType::Bf16);
        let options = EngineOptions { accumulation: 2, ..EngineOptions::new(stage, precision) };
        let trial = Trial { ranks: 3, reads: Reads::None, ..model_of(options) };
        let expected = trial.oracle();
        for seed in 0..3 {
            let delays = Some(Delays { seed, max: Duration::from_micros(200) });
            for overlap in [Overlap::Off, Overlap::On] {
                let plan = Plan { delays, overlap, ..Plan::default() };
                let (ended, _) =
                    world::run_watched(3, plan, |comm| trial.engine(comm).map(|(t, _)| t));
                for (trained, expected) in ended.into_iter().zip(&expected) {
                    let trained = trained.expect("nothing fails");
                    let context = format!("{stage:?}, {overlap:?}, seed {seed}");
                    assert_same(&trial, &trained, expected, &context);
                }
            }
        }
    }
}

fn assert_parity_in_every_bucketing(trial: &Trial) {
    let expected = trial.oracle();
    assert!(expected[0].outcomes.iter().all(Option::is_some), "every step of the trial applies");
    let by_bytes = [1, 40, 200, 1 << 20].map(|bytes| Bucketing::Bytes(Bytes(bytes)));
    for bucketing in by_bytes {
        let options = EngineOptions { bucketing, ..trial.options.clone() };
        assert_trains_to(&Trial { options, ..trial.clone() }, &expected);
    }
    assert_trains_to(&Trial { reads: Reads::None, ..trial.clone() }, &expected);
}

fn assert_parity(trial: &Trial) {
    let expected = trial.oracle();
    assert!(expected[0].outcomes.iter().all(Option::is_some), "every step of the trial applies");
    assert_trains_to(trial, &expected);
}

/// Wherever operations run.
fn assert_trains_to(trial: &Trial, expected: &[Trained]) {
    for (run, overlap) in [(trial.run(), Overlap::Off), (trial.run_overlapped(), Overlap::On)] {
        for (rank, (trained, expected)) in run.iter().zip(expected).enumerate() {
            let context = format!(
                "rank {rank} of {}, {:?}, seed {}, {:?}, {:?}, {overlap:?}",
                trial.ranks, trial.rule, trial.seed, trial.ends, trial.options
            );
            assert_same(trial, trained, expected, &context);
        }
    }
}

fn assert_same(trial: &Trial, trained: &Trained, expected: &Trained, context: &str) {
    if let Some(difference) = first_difference(trained, expected, &trial.specs) {
        panic!("{difference}: {context}");
    }
}
