//! Weights, several passes a micro-batch, passes that are kept back, and windows of any length.

use super::*;
use oxizero_sim::oracle::{MicroBatch, Pass};

const PRECISIONS: [(DType, DType, DType); 5] = [
    (DType::Bf16, DType::Bf16, DType::F32),
    (DType::Bf16, DType::Bf16, DType::Bf16),
    (DType::F16, DType::F16, DType::F32),
    (DType::F32, DType::Bf16, DType::F32),
    (DType::F32, DType::F32, DType::F32),
];

/// Calls `check` with a trial of every stage, world size and precision.
fn each_trial(options: &EngineOptions, check: impl Fn(Trial)) {
    for stage in Stage::ALL {
        for (index, (model, reduce, accumulate)) in PRECISIONS.into_iter().enumerate() {
            for ranks in 1..=4 {
                let precision = Precision { reduce, accumulate, ..Precision::of_model(model) };
                let bucketing = [Bucketing::Unit, Bucketing::Bytes(Bytes(1 << (3 * index)))];
                let options = EngineOptions {
                    stage,
                    precision,
                    bucketing: bucketing[ranks % 2],
                    clip_norm: [None, Some(2.5)][index % 2],
                    ..options.clone()
                };
                check(Trial { ranks, ..model_of(options) });
            }
        }
    }
}

fn options(accumulation: usize, reduction: Reduction) -> EngineOptions {
    let base = EngineOptions::new(Stage::Zero0, Precision::of_model(DType::Bf16));
    EngineOptions { accumulation, reduction, ..base }
}

fn micro_batch(passes: &[Pass], weight: f64) -> MicroBatch {
    MicroBatch { passes: passes.to_vec(), weight }
}

/// Some weigh nothing, and one rank's may all weigh nothing.
#[test]
fn weighted_micro_batches_train_as_the_oracle() {
    for accumulation in [1, 3] {
        each_trial(&options(accumulation, Reduction::Weighted), |trial| {
            let windows = |trial: &Trial, step, rank| {
                let weight = |micro| ((step + 2 * micro + 3 * rank) % 4 * 7 % 5) as f64;
                let micro_batch = |micro| micro_batch(&[Pass::Reduced], weight(micro));
                let mut window: Vec<_> = (0..trial.options.accumulation).map(micro_batch).collect();
                window[0].weight += f64::from(u8::from(rank == 0));
                window
            };
            assert_parity(&Trial { windows, ..trial });
        });
    }
}

#[test]
fn several_passes_a_micro_batch_train_as_the_oracle() {
    for accumulation in [1, 2] {
        each_trial(&options(accumulation, Reduction::Mean), |trial| {
            let windows = |trial: &Trial, step, _| {
                let passes = |micro| vec![Pass::Reduced; 1 + (step + micro) % 3];
                let micro_batch = |micro| micro_batch(&passes(micro), 1.0);
                (0..trial.options.accumulation).map(micro_batch).collect()
            };
            assert_parity(&Trial { windows, ..trial });
        });
    }
}

/// Every pattern of three micro-batches: kept back first, between, last, and throughout.
#[test]
fn passes_that_are_kept_back_train_as_the_oracle() {
    each_trial(&options(3, Reduction::Mean), |trial| {
        let windows = |_: &Trial, step, _| {
            let pass = |bit: usize| [Pass::Reduced, Pass::KeptBack][step >> bit & 1];
            (0..3).map(|micro| micro_batch(&[pass(micro)], 1.0)).collect()
        };
        assert_parity(&Trial { windows, steps: 8, ..trial });
    });
}

/// Among the passes of one micro-batch too, and where the window is one micro-batch.
#[test]
fn passes_of_one_micro_batch_that_are_kept_back_train_as_the_oracle() {
    each_trial(&options(1, Reduction::Sum), |trial| {
        let windows = |_: &Trial, step, _| {
            let passes =
                [0, 1, 2].map(|bit: usize| [Pass::Reduced, Pass::KeptBack][step >> bit & 1]);
            vec![micro_batch(&passes[..1 + step % 3], 1.0)]
        };
        assert_parity(&Trial { windows, steps: 8, ..trial });
    });
}

/// Windows of one to three micro-batches, where three are asked for.
#[test]
fn windows_that_end_early_train_as_the_oracle() {
    for reduction in [Reduction::Mean, Reduction::Sum] {
        each_trial(&options(3, reduction), |trial| {
            let windows =
                |_: &Trial, step, _| vec![micro_batch(&[Pass::Reduced], 1.0); 1 + (step + 1) % 3];
            assert_parity(&Trial { windows, ..trial });
        });
    }
}

/// Windows of one to three micro-batches, where the configuration says one.
#[test]
fn windows_that_the_caller_ends_train_as_the_oracle() {
    each_trial(&options(1, Reduction::Mean), |trial| {
        let windows = |_: &Trial, step, _| vec![micro_batch(&[Pass::Reduced], 1.0); 1 + step % 3];
        assert_parity(&Trial { windows, ends: Ends::Called, ..trial });
    });
}

/// Where nothing is communicated before the window's end, ranks may have more and less of it.
#[test]
fn ranks_with_more_and_less_of_a_window_train_as_the_oracle() {
    each_trial(&options(1, Reduction::Mean), |trial| {
        let windows = match trial.options.stage {
            Stage::Zero0 | Stage::Zero1 => |_: &Trial, step, rank| {
                vec![micro_batch(&[Pass::Reduced], 1.0); 1 + (step + rank) % 3]
            },
            Stage::Zero2 => |_: &Trial, step, rank| {
                vec![micro_batch(&[Pass::KeptBack], 1.0); 1 + (step + rank) % 3]
            },
            Stage::Zero3 => return,
        };
        assert_parity(&Trial { windows, ..trial });
    });
}
