//! Parameters in process groups of their own, in parts and as experts.

use super::*;
use oxizero_sim::layouts::{self, meshes};
use oxizero_sim::oracle::{MicroBatch, Pass};

const PRECISIONS: [(DType, DType, DType); 4] = [
    (DType::Bf16, DType::Bf16, DType::F32),
    (DType::Bf16, DType::Bf16, DType::Bf16),
    (DType::F16, DType::F16, DType::F32),
    (DType::F32, DType::F32, DType::F32),
];

/// Calls `check` with a trial of every stage, arrangement, precision and bucketing.
fn each_layout(options: &EngineOptions, check: impl Fn(Trial)) {
    for stage in Stage::ALL {
        for mesh in meshes() {
            for (index, (model, reduce, accumulate)) in PRECISIONS.into_iter().enumerate() {
                let precision = Precision { reduce, accumulate, ..Precision::of_model(model) };
                let by_bytes = |bytes| Bucketing::Bytes(Bytes(bytes));
                let options = EngineOptions {
                    stage,
                    precision,
                    bucketing: [Bucketing::Unit, by_bytes(1), by_bytes(40), by_bytes(1 << 20)]
                        [index],
                    clip_norm: [Some(2.5), None][index % 2],
                    align: Bytes([64, 1][index % 2]),
                    ..options.clone()
                };
                let rule = [ADAMW, ADAM, SGD][index % 3];
                println!("{stage:?}, {}, {precision:?}", layouts::name(&mesh));
                check(Trial { rule, ..layouts::model_of(options, &mesh) });
            }
        }
    }
}

fn options(accumulation: usize, reduction: Reduction, norm: Norm) -> EngineOptions {
    let base = EngineOptions::new(Stage::Zero0, Precision::of_model(DType::Bf16));
    EngineOptions { accumulation, reduction, norm, ..base }
}

#[test]
fn every_layout_trains_as_the_oracle() {
    for accumulation in [1, 2] {
        each_layout(&options(accumulation, Reduction::Mean, Norm::Two), |trial| {
            for reads in [Reads::All, Reads::None, Reads::SetBack] {
                assert_parity(&Trial { reads, ..trial.clone() });
            }
        });
    }
}

#[test]
fn every_norm_of_every_layout_is_the_oracles() {
    for norm in [Norm::One, Norm::Three, Norm::Infinity] {
        each_layout(&options(1, Reduction::Sum, norm), |trial| assert_parity(&trial));
    }
}

/// Ranks on the same micro-batches weigh the same; an expert's token counts as any other.
#[test]
fn weighted_micro_batches_of_every_layout_train_as_the_oracle() {
    each_layout(&options(2, Reduction::Weighted, Norm::Two), |trial| {
        let windows = |_: &Trial, step: usize, rank: usize| {
            let weight = |micro: usize| (1 + (step + 2 * micro + 3 * rank) % 4 * 7 % 5) as f64;
            let micro_batch =
                |micro| MicroBatch { passes: vec![Pass::Reduced], weight: weight(micro) };
            (0..2).map(micro_batch).collect()
        };
        assert_parity(&Trial { windows, ..trial });
    });
}

#[test]
fn kept_back_passes_of_every_layout_train_as_the_oracle() {
    each_layout(&options(2, Reduction::Mean, Norm::Two), |trial| {
        let windows = |_: &Trial, step: usize, _| {
            let pass = |bit: usize| [Pass::Reduced, Pass::KeptBack][step >> bit & 1];
            (0..2).map(|micro| MicroBatch { passes: vec![pass(micro)], weight: 1.0 }).collect()
        };
        assert_parity(&Trial { windows, ..trial });
    });
}

/// One rank, one parameter: the step is skipped by all.
#[test]
fn skipped_steps_of_every_layout_train_as_the_oracle() {
    each_layout(&options(1, Reduction::Mean, Norm::Two), |trial| {
        for bad in [1, 3, 7, 9] {
            assert!(trial.specs[bad].trainable);
            let backward = |at: At, weights: &[f32]| {
                // The seed says which parameter is bad, in the second step, on the last ranks.
                let bad = (at.step, at.param) == (1, at.seed as usize) && at.rank > 0;
                let value = if bad { f32::INFINITY } else { 0.5 * (1 + at.rank + at.step) as f32 };
                vec![weights.iter().map(|weight| weight + value).collect()]
            };
            let trial = Trial { backward, steps: 3, seed: bad as u64, ..trial.clone() };
            let expected = trial.oracle();
            assert_trains_to(&trial, &expected);
        }
    });
}

/// Over processes' memory, of which the ranks of each group map their own.
#[test]
fn layouts_over_shared_memory_train_as_the_oracle() {
    for stage in Stage::ALL {
        for mesh in meshes() {
            let options = EngineOptions { stage, ..options(2, Reduction::Mean, Norm::Two) };
            let trial = layouts::model_of(options, &mesh);
            let expected = trial.oracle();
            let ended = world::run_shared(trial.ranks, |comm| trial.engine(comm).map(|(t, _)| t));
            let ended = ended.expect("the ranks find each other");
            for (trained, expected) in ended.into_iter().zip(&expected) {
                let trained = trained.expect("nothing fails");
                let context = format!("{stage:?} {}", layouts::name(&mesh));
                assert_same(&trial, &trained, expected, &context);
            }
        }
    }
}
