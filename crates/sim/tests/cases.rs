//! Faults that people met in engines like this one: an input, and the right value.
//!
//! Every case runs in every stage it makes sense in, with buckets of one parameter, of a unit and
//! of the whole model, and on all ranks. The models are SGD with a learning rate of 1 where nothing
//! else is said, so that a weight shows its gradient.
#![expect(clippy::excessive_precision, reason = "exact values are written in full")]

use oxizero::{Engine, EngineOptions, GradIn, GroupOptions, Norm, Reduction, SkipReason};
use oxizero::{GradView, StepOutcome};
use oxizero_core::{Bucketing, Bytes, DType, LossScale, ParamId, ParamSpec, Precision, Rank};
use oxizero_core::{Stage, UnitId};
use oxizero_sim::oracle::Rule;
use oxizero_sim::trial::{Backward, Trained, Trial, to_f32};
use oxizero_sim::watched::{Kind, Plan};
use oxizero_sim::world;

const BF16: DType = DType::Bf16;
const F16: DType = DType::F16;
const F32: DType = DType::F32;

mod precision {
    use super::*;

    #[test]
    fn two_bf16_gradients_average_in_f32_whatever_travels() {
        for reduce in [F32, BF16] {
            let precision = Precision { reduce, ..Precision::of_model(BF16) };
            let backward: Backward = |at, _| vec![vec![[1.0, 1.007_812_5][at.rank]]];
            let trial = Trial { ranks: 2, ..one_weight(precision, backward) };
            everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[1.003_906_25]]));
            for dtype in world::run(2, |comm| {
                let mut engine = trial.start(comm).unwrap();
                trial.micro_batch(&mut engine, 0, 0).unwrap();
                engine.full_grad(ParamId(0)).unwrap().unwrap().dtype()
            }) {
                assert_eq!(dtype, F32);
            }
        }
    }

    #[test]
    fn small_micro_batches_after_a_large_one_are_not_lost() {
        let backward: Backward = |at, _| vec![vec![if at.micro == 0 { 1.0 } else { 1.0 / 512.0 }]];
        let trial = one_weight(Precision::of_model(BF16), backward);
        everywhere(&summed(&trial, 257), |trained| assert_eq!(trained.grads[0], [[1.5]]));
    }

    #[test]
    fn what_cancels_leaves_the_rest() {
        let backward: Backward = |at, _| vec![vec![[256.0, 1.0, -256.0][at.micro]]];
        let trial = one_weight(Precision::of_model(BF16), backward);
        everywhere(&summed(&trial, 3), |trained| assert_eq!(trained.grads[0], [[1.0]]));
    }

    #[test]
    fn the_accumulator_has_the_dtype_that_was_asked_for() {
        let backward: Backward = |at, _| vec![vec![[256.0, 1.0][at.micro]]];
        for (model, accumulate, sum) in [(BF16, BF16, 256.0), (F16, F16, 257.0), (BF16, F32, 257.0)]
        {
            let precision = Precision { accumulate, ..Precision::of_model(model) };
            let trial = summed(&one_weight(precision, backward), 2);
            everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[sum]]));
        }
    }

    #[test]
    fn three_ranks_of_one_average_to_one() {
        let trial = one_weight(Precision::of_model(BF16), |_, _| vec![vec![1.0]]);
        everywhere(&Trial { ranks: 3, ..trial }, |trained| assert_eq!(trained.grads[0], [[1.0]]));
    }

    #[test]
    fn the_mean_of_a_window_keeps_its_small_parts() {
        let backward: Backward = |at, _| vec![vec![if at.micro == 0 { 4.0 } else { 1.0 / 64.0 }]];
        let mut trial = one_weight(Precision::of_model(BF16), backward);
        trial.options.accumulation = 4;
        everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[1.011_718_75]]));
    }

    #[test]
    fn masters_move_where_model_weights_cannot() {
        let mut trial = Trial::new(options(Precision::of_model(BF16)), &[("w", &[1.0])], |_, _| {
            vec![vec![1.0]]
        });
        trial.steps = 10;
        trial.groups[0].lr = 0.001;
        each_stage(&trial, |trial| {
            for (trained, master) in world::run(2, |comm| {
                let (trained, mut engine) = trial.engine(comm).unwrap();
                (trained, engine.full_param(ParamId(0)).unwrap().unwrap())
            }) {
                assert_eq!(master.f32(), [0.990_000_13]);
                assert_eq!(trained.weights, [[0.988_281_25]]);
            }
        });
    }

    #[test]
    fn norms_add_in_more_than_the_gradients_have() {
        let ones =
            Trial::new(options(Precision::of_model(BF16)), &[("w", &[0.0; 4096])], |_, _| {
                vec![vec![1.0; 4096]]
            });
        everywhere(&ones, |trained| assert_eq!(trained.outcomes, [Some(64.0)]));
        let large = one_weight(Precision::of_model(F16), |_, _| vec![vec![300.0]]);
        everywhere(&large, |trained| assert_eq!(trained.outcomes, [Some(300.0)]));
    }

    #[test]
    fn parameters_of_two_dtypes_in_one_unit_keep_their_own() {
        let weights: [(&str, &[f32]); 2] = [("p0", &[1.0]), ("p1", &[1.003_906_25])];
        let mut trial =
            Trial::new(options(Precision::of_model(BF16)), &weights, |_, _| vec![vec![0.0]]);
        trial.specs[1] = ParamSpec::new("p1", &[1], F32, UnitId(0));
        everywhere(&Trial { ranks: 2, ..trial.clone() }, |trained| {
            assert_eq!(trained.weights, [[1.0], [1.003_906_25]]);
        });
        each_stage(&trial, |trial| {
            let dtypes = world::run(2, |comm| {
                let mut engine = trial.start(comm).unwrap();
                engine.pre_forward(UnitId(0)).unwrap();
                let weights = engine.unit_weights(UnitId(0)).unwrap();
                [0, 1].map(|param: usize| weights.params[param].dtype())
            });
            assert_eq!(dtypes, [[BF16, F32]; 2]);
        });
    }
}

mod averaging {
    use super::*;

    #[test]
    fn every_micro_batch_of_every_rank_counts() {
        let backward: Backward = |at, _| vec![vec![[[1.0, 3.0], [5.0, 7.0]][at.rank][at.micro]]];
        let mut trial = Trial { ranks: 2, ..one_weight(Precision::of_model(BF16), backward) };
        trial.options.accumulation = 2;
        everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[4.0]]));
    }

    #[test]
    fn a_constant_gradient_stays_constant() {
        let trial = one_weight(Precision::of_model(BF16), |_, _| vec![vec![1.0]]);
        everywhere(&Trial { ranks: 2, steps: 5, ..trial }, |trained| {
            assert_eq!(trained.grads, vec![[[1.0]]; 5]);
        });
    }
}

mod odd_parameters {
    use super::*;

    #[test]
    fn empty_parameters_change_nothing_for_the_others() {
        let backward: Backward = |at, weights| {
            vec![weights.iter().map(|weight| weight + 1.0 + at.rank as f32).collect()]
        };
        let run = |sizes: &[&[usize]]| {
            let specs = sizes
                .iter()
                .enumerate()
                .map(|(index, shape)| ParamSpec::new(format!("p{index}"), shape, F32, UnitId(0)));
            let specs: Vec<_> = specs.collect();
            let initial = specs.iter().map(|spec| vec![1.0; spec.numel().0]).collect();
            let base = one_weight(Precision::of_model(F32), backward);
            Trial { specs, initial, ranks: 2, ..base }
        };
        let with = run(&[&[0, 8], &[3], &[0], &[5], &[2], &[0, 8]]);
        let without = run(&[&[3], &[5], &[2]]);
        everywhere(&without, |trained| {
            assert_eq!(trained.weights, [vec![-1.5; 3], vec![-1.5; 5], vec![-1.5; 2]]);
            assert_eq!(trained.outcomes, [Some(62.5_f64.sqrt())]);
        });
        everywhere(&with, |trained| {
            let expected = [vec![], vec![-1.5; 3], vec![], vec![-1.5; 5], vec![-1.5; 2], vec![]];
            assert_eq!(trained.weights, expected);
            assert_eq!(trained.outcomes, [Some(62.5_f64.sqrt())]);
        });
        for shapes in world::run(2, |comm| {
            let mut engine = with.start(comm).unwrap();
            let weights = engine.unit_weights(UnitId(0)).unwrap();
            weights.params.iter().map(|param| param.shape.clone()).collect::<Vec<_>>()
        }) {
            assert_eq!(shapes, [vec![0, 8], vec![3], vec![0], vec![5], vec![2], vec![0, 8]]);
        }
    }

    /// y = w * x1 + w * x2, where the module runs twice in one step.
    #[test]
    fn a_module_that_is_used_twice_sums_its_gradients() {
        let backward: Backward =
            |at, _| [[1.0, 2.0], [3.0, 4.0]][at.rank].map(|x| vec![x]).to_vec();
        let mut trial = Trial { ranks: 2, ..one_weight(Precision::of_model(F32), backward) };
        trial.specs[0].contributions = 2;
        everywhere(&trial, |trained| assert_eq!(trained.grads[0], [[5.0]]));
    }

    #[test]
    fn a_tied_weight_has_one_gradient_one_norm_and_one_state() {
        let mut trial = one_weight(Precision::of_model(BF16), |_, _| vec![vec![1.0], vec![2.0]]);
        trial.specs[0].contributions = 2;
        trial.rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
        everywhere(&trial, |trained| {
            assert_eq!((&trained.grads[0], trained.outcomes[0]), (&vec![vec![3.0]], Some(3.0)));
        });
        each_stage(&trial, |trial| {
            let memory = world::run(1, |comm| trial.engine(comm).unwrap().1.memory());
            assert_eq!(memory[0].optimizer, Bytes(2 * 4)); // two moments of one f32
        });
    }

    #[test]
    fn gradients_may_arrive_in_another_order_on_each_rank() {
        let mut trial = two_units(F32, |_, _| vec![]);
        trial.ranks = 2;
        each_stage(&trial, |trial| {
            for grads in world::run(2, |comm| {
                let rank = comm.rank().0;
                let mut engine = trial.start(comm).unwrap();
                let given = [[1.0, 3.0], [10.0, 30.0]];
                for param in if rank == 0 { [0, 1] } else { [1, 0] } {
                    let values = GradView::F32(std::slice::from_ref(&given[param][rank]));
                    let grad = GradIn { values, loss_scale: LossScale::ONE };
                    engine.grad_ready(ParamId(param), grad).unwrap();
                }
                engine.backward_end().unwrap();
                [0, 1].map(|param| full_grad(&mut engine, param))
            }) {
                assert_eq!(grads, [[2.0], [20.0]]);
            }
        });
    }

    #[test]
    fn a_parameter_that_a_step_does_not_use_does_not_move() {
        let backward: Backward = |at, _| match (at.param, at.step) {
            (0, 1) => vec![],
            _ => vec![vec![1.0]],
        };
        let trial = Trial { ranks: 2, steps: 2, ..two_units(BF16, backward) };
        everywhere(&trial, |trained| {
            assert_eq!(trained.grads, [[[1.0], [1.0]], [[0.0], [1.0]]]);
            assert_eq!(trained.weights, [[-1.0], [-2.0]]);
        });
    }

    /// Its moments are untouched too: used in the third step for the first time, it moves as in a
    /// first step, by the learning rate beside the decay.
    #[test]
    fn a_parameter_that_no_rank_uses_does_not_decay() {
        let backward: Backward =
            |at, _| if at.param == 0 && at.step < 2 { vec![] } else { vec![vec![1.0]] };
        let mut trial = Trial { ranks: 2, ..two_units(F32, backward) };
        trial.initial = vec![vec![1.0], vec![1.0]];
        trial.rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 };
        trial.groups = vec![GroupOptions { lr: 0.125, weight_decay: 0.5 }];
        everywhere(&Trial { steps: 2, ..trial.clone() }, |trained| {
            assert_eq!(trained.weights[0], [1.0]);
            assert!(trained.weights[1][0] < 0.7);
        });
        everywhere(&Trial { steps: 3, ..trial.clone() }, |trained| {
            let first_step = 1.0 - 0.125 * 0.5 - 0.125;
            assert!((trained.weights[0][0] - first_step).abs() < 1e-6); // rounding in f32
        });
    }

    #[test]
    fn ten_parameters_in_buckets_of_five_are_two_reductions_every_step() {
        let params: Vec<_> = (0..10).map(|index| format!("p{index}")).collect();
        let zeros = [0.0; 10];
        let params: Vec<_> = params.iter().map(|name| (name.as_str(), &zeros[..])).collect();
        let mut options = options(Precision::of_model(F32));
        options.bucketing = Bucketing::Bytes(Bytes(50 * 4));
        let trial = Trial::new(options, &params, |_, _| vec![vec![1.0; 10]]);
        for stage in Stage::ALL {
            let trial = in_stage(&trial, stage);
            for steps in 1..4 {
                let trial = Trial { steps, ..trial.clone() };
                let (_, logs) = world::run_watched(2, Plan::default(), |comm| {
                    trial.engine(comm).map(|_| ()).unwrap();
                });
                for log in logs {
                    assert_eq!(log.count(Kind::ReduceScatter), 2 * steps, "{stage:?}");
                }
            }
        }
    }
}

mod norms {
    use super::*;

    #[test]
    fn shards_of_three_and_four_are_clipped_as_one_vector() {
        let mut trial =
            Trial::new(options(Precision::of_model(F32)), &[("w", &[0.0; 2])], |_, _| {
                vec![vec![3.0, 4.0]]
            });
        trial.options.clip_norm = Some(1.0);
        everywhere(&Trial { ranks: 2, ..trial }, |trained| {
            assert_eq!(trained.outcomes, [Some(5.0)]);
            assert_eq!(trained.weights, [[-0.6, -0.8]]);
        });
    }

    #[test]
    fn the_infinity_norm_is_the_largest_magnitude() {
        let backward: Backward = |at, _| vec![vec![[3.0, -4.0][at.param]]];
        let mut trial = Trial { ranks: 2, ..two_units(F32, backward) };
        trial.options.norm = Norm::Infinity;
        trial.options.clip_norm = Some(2.0);
        everywhere(&trial, |trained| {
            assert_eq!(trained.outcomes, [Some(4.0)]);
            assert_eq!(trained.weights, [[-1.5], [2.0]]);
        });
    }

    #[test]
    fn an_infinite_gradient_skips_the_step_everywhere_and_names_its_place() {
        let backward: Backward = |at, _| match (at.step, at.rank, at.param) {
            (0, 1, 1) => vec![vec![f32::INFINITY, 1.0]],
            _ => vec![vec![1.0; 2]],
        };
        let params: [(&str, &[f32]); 2] = [("fine", &[1.0, 2.0]), ("bad", &[3.0, 4.0])];
        let mut trial = Trial::new(options(Precision::of_model(BF16)), &params, backward);
        trial.options.clip_norm = Some(1.0);
        each_stage(&trial, |trial| {
            for (skipped, after_skip, next) in world::run(2, |comm| {
                let mut engine = trial.start(comm).unwrap();
                let (skipped, _) = trial.window(&mut engine, 0).unwrap();
                let weights = trial.weights(&mut engine).unwrap();
                (skipped, weights, trial.window(&mut engine, 1).unwrap().0)
            }) {
                let parameter = "bad".to_owned();
                let reason = SkipReason::NonFinite;
                assert_eq!(skipped, StepOutcome::Skipped { reason, parameter, rank: Rank(1) });
                assert_eq!(after_skip, trial.initial);
                let StepOutcome::Applied { norm_before, norm_after, .. } = next else {
                    panic!("the step after a skipped one is {next:?}");
                };
                assert_eq!((norm_before, norm_after), (2.0, 1.0));
            }
        });
    }

    #[test]
    fn a_gradient_is_divided_by_the_scale_it_was_computed_under() {
        let params: [(&str, &[f32]); 1] = [("w", &[0.0; 2])];
        let large = |_, _: &[f32]| vec![vec![3.0 * 65536.0, 4.0 * 65536.0]];
        let small = |_, _: &[f32]| vec![vec![3.0 * 32768.0, 4.0 * 32768.0]];
        let options = options(Precision::of_model(F32));
        let before = Trial { loss_scale: 65536.0, ..Trial::new(options.clone(), &params, large) };
        let after = Trial { loss_scale: 32768.0, ..Trial::new(options, &params, small) };
        for stage in Stage::ALL {
            let (before, after) = (in_stage(&before, stage), in_stage(&after, stage));
            for norms in world::run(2, |comm| {
                let mut engine = before.start(comm).unwrap();
                [&before, &after, &before].map(|trial| trial.window(&mut engine, 0).unwrap().0)
            }) {
                for outcome in norms {
                    let StepOutcome::Applied { norm_before, .. } = outcome else {
                        panic!("{outcome:?}");
                    };
                    assert_eq!(norm_before, 5.0);
                }
            }
        }
    }
}

/// Elements lie side by side, so that ranks share even the smallest parameter.
fn options(precision: Precision) -> EngineOptions {
    EngineOptions { align: Bytes(1), ..EngineOptions::new(Stage::Zero0, precision) }
}

fn one_weight(precision: Precision, backward: Backward) -> Trial {
    Trial::new(options(precision), &[("w", &[0.0])], backward)
}

fn two_units(model: DType, backward: Backward) -> Trial {
    let params: [(&str, &[f32]); 2] = [("p0", &[0.0]), ("p1", &[0.0])];
    Trial::new(options(Precision::of_model(model)), &params, backward)
}

fn summed(trial: &Trial, accumulation: usize) -> Trial {
    let options =
        EngineOptions { accumulation, reduction: Reduction::Sum, ..trial.options.clone() };
    Trial { options, ..trial.clone() }
}

fn in_stage(trial: &Trial, stage: Stage) -> Trial {
    Trial { options: EngineOptions { stage, ..trial.options.clone() }, ..trial.clone() }
}

/// Calls `check` with the trial in every stage and bucketing.
fn each_stage(trial: &Trial, check: impl Fn(&Trial)) {
    let bucketings =
        [Bucketing::Bytes(Bytes(1)), Bucketing::Unit, Bucketing::Bytes(Bytes(1 << 20))];
    for stage in Stage::ALL {
        for bucketing in bucketings {
            let mut trial = in_stage(trial, stage);
            trial.options.bucketing = bucketing;
            println!("{stage:?}, {bucketing:?}, {} ranks", trial.ranks);
            check(&trial);
        }
    }
}

/// Calls `check` with what every rank has after the trial, in every stage and bucketing.
fn everywhere(trial: &Trial, check: impl Fn(&Trained)) {
    each_stage(trial, |trial| trial.run().iter().for_each(&check));
}

fn full_grad(engine: &mut Engine, param: usize) -> Vec<f32> {
    let grad = engine.full_grad(ParamId(param)).expect("the window is complete");
    to_f32(grad.expect("the parameter is trained").view())
}
