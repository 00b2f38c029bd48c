//! Parameters of process groups: copies, parts of tensors, and experts.

use super::*;
use oxizero_comm::Communicator;
use oxizero_core::{Along, Mesh};
use oxizero_sim::layouts::{self, mesh};
use oxizero_sim::oracle::{MicroBatch, Pass};
use oxizero_sim::watched::{Log, Watched};

use Along::{Distinct, Reduced, Replicated};
const ROWS: Along = Along::Split { dim: 0 };

/// The trial on this mesh; `along` says by parameter what it does along each axis.
pub(super) fn on(mesh: &Mesh, along: &[&[Along]], trial: Trial) -> Trial {
    let mut trial = Trial { ranks: mesh.world_size().get(), ..trial };
    trial.options.mesh = Some(mesh.clone());
    for (spec, along) in trial.specs.iter_mut().zip(along) {
        spec.along = along.to_vec();
    }
    trial
}

/// Calls `check` with every rank and what it has after the trial, in every stage and bucketing.
pub(super) fn each_rank(trial: &Trial, check: impl Fn(usize, &Trained)) {
    each_stage(trial, |trial| {
        trial.run().iter().enumerate().for_each(|(rank, trained)| check(rank, trained));
    });
}

/// An engine that has had its first micro-batch, and a log of what it asks for.
fn watched(trial: &Trial, comm: Box<dyn Communicator>) -> (Engine, Log) {
    let comm = Watched::new(comm, Plan::default());
    let log = comm.log();
    let mut engine = trial.start(Box::new(comm)).expect("the engine starts");
    trial.micro_batch(&mut engine, 0, 0).expect("nothing fails");
    (engine, log)
}

/// A gradient of 12 on both ranks of a tensor axis, beside parts of 3 and 4.
#[test]
fn a_replicated_gradient_counts_once_in_the_norm() {
    let backward: Backward = |at, _| vec![vec![[12.0, [3.0, 4.0][at.rank % 2]][at.param]]];
    for data in [1, 2] {
        let mesh = mesh(&[("data", data), ("tensor", 2)]);
        for (norm, size, of_parts) in [
            (Norm::One, 19.0, 7.0),
            (Norm::Two, 13.0, 5.0),
            (Norm::Three, f64::cbrt(1819.0), f64::cbrt(91.0)),
            (Norm::Infinity, 12.0, 4.0),
        ] {
            for replicated in [&[][..], &[Reduced, Replicated]] {
                let along = [replicated, &[Reduced, ROWS]];
                let mut trial = on(&mesh, &along, two_units(F32, backward));
                trial.options.norm = norm;
                each_rank(&trial, |rank, trained| {
                    assert_eq!(trained.outcomes, [Some(size)]);
                    assert_eq!(trained.grad_norms, [[Some(12.0), Some(of_parts)]]);
                    assert_eq!(trained.weights, [[-12.0], [-[3.0, 4.0][rank % 2]]]);
                });
                trial.options.clip_norm = Some(size / 2.0);
                each_rank(&trial, |rank, trained| {
                    assert_eq!(trained.outcomes, [Some(size)]);
                    assert_eq!(trained.weights, [[-6.0], [-[1.5, 2.0][rank % 2]]]);
                });
            }
        }
    }
}

/// A thousand parameters of four kinds and two dtypes, of which one is frozen: two groups to
/// reduce over and two dtypes; then one group with other parts, or three.
#[test]
fn a_models_gradients_are_read_in_one_collective_a_group_and_dtype() {
    let names: Vec<_> = (0..1000).map(|index| format!("p{index}")).collect();
    let params: Vec<_> = names.iter().map(|name| (name.as_str(), &[0.0; 2][..])).collect();
    let precision = Precision { accumulate: BF16, ..Precision::of_model(BF16) };
    let backward: Backward = |at, _| vec![vec![at.param as f32 % 32.0; 2]];
    let [data_expert, expert_tensor] = [[2, 2, 0], [0, 2, 2]].map(|sizes| {
        let axes = ["data", "expert", "tensor"].into_iter().zip(sizes);
        mesh(&axes.filter(|(_, size)| *size > 0).collect::<Vec<_>>())
    });
    let kinds_of_data = [[Reduced; 2], [Reduced, Distinct], [Reduced, ROWS], [Reduced, Distinct]];
    let kinds_of_tensor =
        [[Reduced, Replicated], [Reduced, ROWS], [Distinct, Replicated], [Distinct, ROWS]];
    for (mesh, expert, kinds, parts_groups) in
        [(data_expert, 1, kinds_of_data, 1), (expert_tensor, 0, kinds_of_tensor, 3)]
    {
        let mut trial = on(&mesh, &[], Trial::new(options(precision), &params, backward));
        for (index, spec) in trial.specs.iter_mut().enumerate() {
            spec.along = kinds[index % 4].to_vec();
            spec.dtype = if index / 4 % 10 == 0 { F32 } else { BF16 };
            spec.trainable = index != 17;
        }
        for stage in Stage::ALL {
            let trial = in_stage(&trial, stage);
            world::run(4, |comm| {
                let (mut engine, log) = watched(&trial, comm);
                engine.grad_norms().unwrap(); // the window is reduced now
                let reads = if stage == Stage::Zero0 { 0 } else { 2 * 2 };
                for (scope, collectives) in
                    [(Scope::DataParallel, reads), (Scope::Global, reads + 2 * parts_groups)]
                {
                    let before = log.count(Kind::AllGather);
                    let grads = engine.full_grads(scope).unwrap();
                    assert_eq!(log.count(Kind::AllGather) - before, collectives, "{scope}");
                    for index in 0..1000 {
                        let shape = match (scope, kinds[index % 4]) {
                            (Scope::DataParallel, _) => vec![2],
                            (_, [Distinct, ROWS]) => vec![2, 4],
                            (_, kind) if kind.contains(&Distinct) => vec![2, 2],
                            (_, kind) if kind.contains(&ROWS) => vec![4],
                            _ => vec![2],
                        };
                        let param = ParamId(index);
                        assert_eq!(grads.shape(param), Some(&shape[..]));
                        let share = if kinds[index % 4][expert] == Reduced { 1.0 } else { 0.5 };
                        let value = share * (index as f32 % 32.0);
                        let right = vec![value; shape.iter().product()];
                        assert_eq!(grads.get(param).map(to_f32), (index != 17).then_some(right));
                    }
                }
            });
        }
    }
}

/// Beside the one that agrees on the call.
#[test]
fn norms_are_one_small_exchange_and_those_of_the_whole_tensors() {
    let norm_of = |values: &[f32], norm| {
        let values = values.iter().map(|value| f64::from(*value).abs());
        match norm {
            Norm::One => values.sum(),
            Norm::Two => values.map(|value| value * value).sum::<f64>().sqrt(),
            Norm::Three => values.map(|value| value.powi(3)).sum::<f64>().cbrt(),
            Norm::Infinity => values.fold(0.0, f64::max),
        }
    };
    for mesh in layouts::meshes() {
        for stage in Stage::ALL {
            for norm in [Norm::One, Norm::Two, Norm::Three, Norm::Infinity] {
                let options = EngineOptions::new(stage, Precision::of_model(F32));
                let trial = layouts::model_of(EngineOptions { norm, ..options }, &mesh);
                world::run(trial.ranks, |comm| {
                    let (mut engine, log) = watched(&trial, comm);
                    let grads = engine.full_grads(Scope::Global).unwrap();
                    let before = log.operations().len();
                    let norms = engine.grad_norms().unwrap();
                    assert_eq!(log.operations()[before..], [Kind::Exchange; 2]);
                    for (param, size) in norms.into_iter().enumerate() {
                        // Of a parameter of another dtype what was read is rounded to it.
                        let exact = trial.specs[param].dtype == F32;
                        let read = grads.get(ParamId(param)).map(to_f32);
                        let right = read.map(|grad| norm_of(&grad, norm));
                        assert_eq!(size.is_some(), right.is_some());
                        let (size, right) = (size.unwrap_or(0.0), right.unwrap_or(0.0));
                        let tolerance = if exact { 1e-12 } else { 1e-2 };
                        assert!((size - right).abs() <= tolerance * right, "{size} {right}");
                    }
                });
            }
        }
    }
}

/// In one bucket of two shards, each parameter lies in one of them, of each group.
#[test]
fn an_expert_that_another_rank_owns_is_read_whole_and_by_its_group() {
    let params: [(&str, &[f32]); 3] = [("p0", &[0.0; 3]), ("p1", &[0.0; 3]), ("frozen", &[0.0])];
    let backward: Backward = |at, _| {
        let expert = at.rank % 2;
        vec![[1.0, 2.0, 3.0].map(|g| 2.0 * (g + (at.param + 10 * expert) as f32)).to_vec()]
    };
    let mut trial = Trial::new(options(Precision::of_model(F32)), &params, backward);
    trial.specs[1].unit = UnitId(0);
    trial.specs[2].trainable = false;
    let experts: &[Along] = &[Reduced, Distinct];
    let trial = on(&mesh(&[("data", 2), ("expert", 2)]), &[experts; 3], trial);
    each_stage(&trial, |trial| {
        world::run(4, |comm| {
            let rank = comm.rank().0;
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            let first = |expert: usize| [1.0, 2.0, 3.0].map(|g| g + 10.0 * expert as f32);
            let second = |expert: usize| first(expert).map(|g| g + 1.0);
            assert_eq!(full_grad(&mut engine, 0), first(rank % 2));
            // Unknown parameters harm no others.
            let error = engine.full_grad(ParamId(3)).unwrap_err();
            assert!(error.to_string().contains("no parameter 3"), "{error}");
            assert_eq!(full_grad(&mut engine, 1), second(rank % 2));
            let all = engine.full_grads(Scope::Global).unwrap();
            assert_eq!(all.get(ParamId(0)).map(to_f32), Some([first(0), first(1)].concat()));
            assert_eq!(all.get(ParamId(1)).map(to_f32), Some([second(0), second(1)].concat()));
            assert_eq!(all.get(all.param("frozen").unwrap()).map(to_f32), None);
            assert!(all.param("nobody").unwrap_err().to_string().contains("`nobody`"));
            assert!(all.get(ParamId(3)).is_none());
        });
    });
}

/// Its norm, its update and its decay are missing there, and not elsewhere.
#[test]
fn an_expert_that_its_rank_does_not_use_is_skipped_there_and_not_elsewhere() {
    let backward: Backward = |at, _| match (at.param, at.rank) {
        (0, 1) => vec![],
        _ => vec![vec![2.0]],
    };
    let mut trial = two_units(F32, backward);
    trial.initial = vec![vec![1.0], vec![1.0]];
    trial.rule = Rule::AdamW { beta1: 0.5, beta2: 0.5, eps: 1e-8 };
    trial.groups = vec![GroupOptions { lr: 0.125, weight_decay: 0.5 }];
    let trial = on(&mesh(&[("expert", 2)]), &[&[Distinct], &[]], trial);
    each_rank(&trial, |rank, trained| {
        assert_eq!(trained.grads[0], [[[1.0], [0.0]][rank], [2.0]]);
        assert_eq!(trained.global_grads[0], [vec![1.0, 0.0], vec![2.0]]);
        let moved = trained.weights[0][0] - (1.0 - 0.125 * 0.5 - 0.125);
        match rank {
            0 => assert!(moved.abs() < 1e-6), // rounding in f32
            _ => assert_eq!(trained.states[0], [[1.0], [0.0], [0.0]]),
        }
    });
}

/// One rank of each expert's group uses it: the other contributes zeros.
#[test]
fn an_expert_that_one_rank_of_its_group_uses_is_updated_on_all_of_them() {
    let backward: Backward = |at, _| match (at.param, at.rank) {
        (0, 0 | 3) => vec![vec![4.0 * (1.0 + at.rank as f32)]],
        (0, _) => vec![],
        _ => vec![vec![1.0]],
    };
    let along: [&[Along]; 2] = [&[Reduced, Distinct], &[]];
    let trial = on(&mesh(&[("data", 2), ("expert", 2)]), &along, two_units(BF16, backward));
    each_rank(&trial, |rank, trained| {
        let expert = [1.0, 4.0][rank % 2];
        assert_eq!(trained.grads[0], [[expert], [1.0]]);
        assert_eq!(trained.weights, [[-expert], [-1.0]]);
    });
}

/// A part that one rank alone uses makes the tensor used: the other part decays with it.
#[test]
fn a_tensor_of_which_one_part_is_used_is_updated_whole() {
    let backward: Backward = |at, _| match (at.param, at.rank) {
        (0, 1) => vec![],
        _ => vec![vec![1.0]],
    };
    let mut trial = two_units(F32, backward);
    trial.initial = vec![vec![1.0], vec![1.0]];
    trial.groups = vec![GroupOptions { lr: 0.5, weight_decay: 0.5 }];
    let trial = on(&mesh(&[("tensor", 2)]), &[&[ROWS], &[]], trial);
    each_rank(&trial, |rank, trained| {
        assert_eq!(trained.weights, [[[0.25, 0.75][rank]], [0.25]]);
    });
}

/// The same divisor for every parameter: what all ranks worked on, each micro-batch once.
#[test]
fn micro_batches_of_all_ranks_count_for_experts_and_parts_too() {
    let ones: Backward = |_, _| vec![vec![1.0]];
    let kinds: [&[Along]; 2] = [&[Reduced, Distinct, Replicated], &[Reduced, Distinct, ROWS]];
    for accumulation in [1, 3] {
        for (sizes, of_expert) in [([1, 2, 1], 0.5), ([2, 2, 1], 0.5), ([1, 2, 2], 0.5)] {
            let axes: Vec<_> = ["data", "expert", "tensor"].into_iter().zip(sizes).collect();
            let mut trial = on(&mesh(&axes), &kinds, two_units(BF16, ones));
            trial.options.accumulation = accumulation;
            each_rank(&trial, |_, trained| assert_eq!(trained.grads[0], [[of_expert]; 2]));
        }
    }
}

/// Five tokens on one rank and one on the other: each weighs as much, whatever its expert.
#[test]
fn tokens_weigh_the_same_in_experts() {
    let windows = |_: &Trial, _, rank: usize| {
        vec![MicroBatch { passes: vec![Pass::Reduced], weight: [5.0, 1.0][rank / 2] }]
    };
    let backward: Backward = |at, _| vec![vec![[5.0 * 1.0, 1.0 * 10.0][at.rank / 2]]];
    let trial = Trial { windows, ..two_units(F32, backward) };
    let along: [&[Along]; 2] = [&[], &[Distinct, Replicated]];
    let mut trial = on(&mesh(&[("expert", 2), ("tensor", 2)]), &along, trial);
    trial.options.reduction = Reduction::Weighted;
    each_rank(&trial, |rank, trained| {
        assert_eq!(trained.grads[0], [[2.5], [[5.0, 10.0][rank / 2] / 6.0]]);
    });
}

/// Ranks along a sequence axis work on parts of the same micro-batches, which count once.
#[test]
fn contributions_of_a_sequence_axis_add_up_and_count_once() {
    let backward: Backward = |at, _| vec![vec![[1.0, 2.0, 30.0, 40.0][at.rank]]];
    let along: [&[Along]; 2] = [&[Reduced, Reduced], &[Reduced, Distinct]];
    let trial = on(&mesh(&[("data", 2), ("sequence", 2)]), &along, two_units(F32, backward));
    each_rank(&trial, |rank, trained| {
        assert_eq!(trained.grads[0], [[36.5], [[15.5, 21.0][rank % 2]]]);
    });
}

#[test]
fn an_expert_of_one_rank_that_is_infinite_skips_the_step_everywhere_and_is_named() {
    let backward: Backward = |at, _| match (at.param, at.rank) {
        (1, 3) => vec![vec![f32::NAN]],
        _ => vec![vec![1.0]],
    };
    let along: [&[Along]; 2] = [&[], &[Reduced, Distinct]];
    let trial = on(&mesh(&[("data", 2), ("expert", 2)]), &along, two_units(BF16, backward));
    each_stage(&trial, |trial| {
        for outcome in world::run(4, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.window(&mut engine, 0).unwrap().0
        }) {
            let (reason, parameter) = (SkipReason::NonFinite, "p1".to_owned());
            assert_eq!(outcome, StepOutcome::Skipped { reason, parameter, rank: Rank(3) });
        }
    });
}

/// Each rank has what the plan says, whichever groups its parameters are of.
#[test]
fn what_ranks_of_a_mesh_hold_is_what_is_planned() {
    for mesh in layouts::meshes() {
        let options = EngineOptions::new(Stage::Zero0, Precision::of_model(BF16));
        let trial = Trial { steps: 2, ..layouts::model_of(options, &mesh) };
        for stage in Stage::ALL {
            let trial = in_stage(&trial, stage);
            for (resting, planned) in world::run(trial.ranks, |comm| {
                let (_, engine) = trial.engine(comm).unwrap();
                (engine.memory(), engine.plan().rest)
            }) {
                assert_eq!(resting, planned);
            }
        }
    }
}
