//! Meshes that are wrong, and ranks that do not keep to theirs.

use super::*;
use oxizero_core::{Along, Mesh};
use oxizero_sim::layouts::mesh;

fn on(mesh: &Mesh, trial: Trial) -> Trial {
    let mut trial = Trial { ranks: mesh.world_size().get(), ..trial };
    trial.options.mesh = Some(mesh.clone());
    trial
}

/// Why each rank cannot start.
fn refusals(trial: &Trial) -> Vec<String> {
    let errors = world::run(2, |comm| trial.start(comm).err());
    errors.into_iter().map(|error| error.expect("it is refused").to_string()).collect()
}

#[test]
fn a_mesh_of_another_size_than_the_worlds_is_refused_with_both() {
    let trial = one_weight(Precision::of_model(F32), |_, _| vec![]);
    for sizes in [[3, 1], [2, 2], [1, 1]] {
        let axes: Vec<_> = ["data", "tensor"].into_iter().zip(sizes).collect();
        for error in refusals(&on(&mesh(&axes), trial.clone())) {
            let ranks = format!("= {} ranks", sizes[0] * sizes[1]);
            assert!(error.contains("`mesh") && error.contains(&ranks), "{error}");
            assert!(error.contains("multiply to 2"), "{error}");
        }
    }
}

#[test]
fn parameters_that_do_not_fit_the_mesh_are_refused_by_name() {
    let mut trial =
        on(&mesh(&[("tensor", 2)]), one_weight(Precision::of_model(F32), |_, _| vec![]));
    for (along, said) in [
        (vec![Along::Reduced; 2], "2 axes of the mesh, which has 1"),
        (vec![Along::Split { dim: 1 }], "split over `tensor` along dimension 1 of [1]"),
        (vec![Along::Split { dim: usize::MAX }], "split over `tensor`"),
    ] {
        trial.specs[0].along = along;
        for error in refusals(&trial) {
            assert!(error.contains("parameter `w`") && error.contains(said), "{error}");
        }
    }
    // Without a mesh there is one axis.
    trial.options.mesh = None;
    trial.specs[0].along = vec![Along::Reduced; 2];
    assert!(refusals(&trial)[0].contains("which has 1"));
}

#[test]
fn meshes_and_groups_that_differ_are_refused_on_all_ranks() {
    let trial = on(
        &mesh(&[("data", 1), ("tensor", 2)]),
        one_weight(Precision::of_model(F32), |_, _| vec![]),
    );
    let mut other_mesh = trial.clone();
    other_mesh.options.mesh = Some(mesh(&[("data", 2), ("tensor", 1)]));
    let mut other_group = trial.clone();
    other_group.specs[0].along = vec![Along::Reduced, Along::Distinct];
    for (other, of) in [
        (other_mesh, "`mesh` is data 1 x "),
        (other_group, "the place on the mesh of parameter `w`"),
    ] {
        for error in world::run(2, |comm| {
            let trial = if comm.rank() == Rank(1) { &other } else { &trial };
            trial.start(comm).err()
        }) {
            let told = error.expect("rank 1 differs").to_string();
            assert!(told.starts_with(of) && told.contains(" on rank 1;"), "{told}");
        }
    }
}

/// One reads its own tensors, the others whole ones; then all go on.
#[test]
fn scopes_that_differ_are_refused_on_all_ranks() {
    let base = two_units(F32, |_, _| vec![vec![1.0]]);
    let mut trial = on(&mesh(&[("data", 2), ("tensor", 2)]), base);
    trial.specs[1].along = vec![Along::Reduced, Along::Split { dim: 0 }];
    for odd in 0..4 {
        each_stage(&trial, |trial| {
            each_rank(trial, |engine| {
                trial.micro_batch(engine, 0, 0).unwrap();
                let mut scopes = [Scope::DataParallel, Scope::Global];
                if rank_of(engine) == odd {
                    scopes.reverse();
                }
                let error = engine.full_grads(scopes[0]).unwrap_err();
                assert!(matches!(error, EngineError::CallsDiffer { .. }), "{error:?}");
                let [own, global] = [Scope::DataParallel, Scope::Global]
                    .map(|scope| engine.full_grads(scope).unwrap());
                let set = if rank_of(engine) == odd { &own } else { &global };
                let error = engine.set_full_grads(set).unwrap_err();
                assert!(matches!(error, EngineError::CallsDiffer { .. }), "{error:?}");
                assert_eq!(global.get(ParamId(1)).map(to_f32), Some(vec![1.0, 1.0]));
                engine.step().unwrap();
            });
        });
    }
}

/// Gradients of another engine, whose tensors have other sizes or are frozen.
#[test]
fn whole_gradients_of_another_shape_are_refused_on_all_ranks() {
    let trial = on(&mesh(&[("tensor", 2)]), two_units(F32, |_, _| vec![vec![1.0]]));
    let mut cut = trial.clone();
    cut.specs[1].along = vec![Along::Split { dim: 0 }];
    each_stage(&trial, |trial| {
        let mut cut = cut.clone();
        cut.options = trial.options.clone();
        let mut others = each_rank(&cut, |engine| {
            cut.micro_batch(engine, 0, 0).unwrap();
            engine.full_grads(Scope::Global).unwrap()
        });
        let other = others.swap_remove(0);
        each_rank(trial, |engine| {
            trial.micro_batch(engine, 0, 0).unwrap();
            let own = engine.full_grads(Scope::Global).unwrap();
            let set = if rank_of(engine) == 1 { &other } else { &own };
            let error = engine.set_full_grads(set).unwrap_err();
            let said = match rank_of(engine) {
                1 => matches!(error, EngineError::Param { .. }),
                _ => matches!(error, EngineError::PeerRefused { rank: Rank(1) }),
            };
            assert!(said, "{error:?}");
            assert_eq!(full_grad(engine, 1), [1.0]);
        });
    });
}

/// Nobody waits for the rank that refuses, nothing is updated, and the step may be taken again.
#[test]
fn a_step_that_one_rank_refuses_is_taken_by_none() {
    let trial = on(&mesh(&[("data", 2)]), two_units(F32, |_, _| vec![vec![1.0]]));
    each_stage(&trial, |trial| {
        each_rank(trial, |engine| {
            trial.micro_batch(engine, 0, 0).unwrap();
            if rank_of(engine) == 1 {
                engine.refuse_step().unwrap();
            } else {
                let error = engine.step().unwrap_err();
                assert!(matches!(error, EngineError::PeerRefused { rank: Rank(1) }), "{error:?}");
            }
            let outcome = engine.step().unwrap();
            assert!(matches!(outcome, StepOutcome::Applied { .. }), "{outcome:?}");
        });
    });
}

/// A rank that comes without a backward, in stages whose backward reduces nothing.
#[test]
fn a_step_that_one_rank_has_no_gradients_for_is_taken_by_none() {
    let mut trial = on(&mesh(&[("data", 2)]), two_units(F32, |_, _| vec![vec![1.0]]));
    for stage in [Stage::Zero0, Stage::Zero1] {
        trial.options.stage = stage;
        each_rank(&trial, |engine| {
            if rank_of(engine) == 1 {
                engine.refuse_step().unwrap();
            } else {
                trial.micro_batch(engine, 0, 0).unwrap();
                let error = engine.step().unwrap_err();
                assert!(matches!(error, EngineError::PeerRefused { rank: Rank(1) }), "{error:?}");
            }
            engine.discard_window().unwrap();
            trial.micro_batch(engine, 0, 0).unwrap();
            let outcome = engine.step().unwrap();
            assert!(matches!(outcome, StepOutcome::Applied { .. }), "{outcome:?}");
        });
    }
}

/// The last rank had one more micro-batch, or one of another weight, than the rank beside it.
#[test]
fn micro_batches_that_differ_along_a_tensor_axis_are_refused_on_all_ranks() {
    for (data, reads) in [(1, true), (1, false), (2, true), (2, false)] {
        for weighs in [true, false] {
            let base = two_units(F32, |_, _| vec![vec![1.0]]);
            let mut trial = on(&mesh(&[("data", data), ("tensor", 2)]), base);
            trial.options.reduction = if weighs { Reduction::Weighted } else { Reduction::Mean };
            let last = 2 * data - 1;
            each_stage(&trial, |trial| {
                if !weighs && data > 1 && trial.options.stage >= Stage::Zero2 {
                    return; // each micro-batch is reduced, so that the others would wait for one
                }
                for error in each_rank(trial, |engine| {
                    let is_last = rank_of(engine) == last;
                    engine.set_boundary(Boundary::Later);
                    if is_last && !weighs {
                        trial.micro_batch(engine, 0, 0).unwrap();
                        engine.step().unwrap();
                    }
                    engine.set_boundary(Boundary::Now);
                    trial.micro_batch(engine, 0, 0).unwrap();
                    if is_last && weighs {
                        engine.weigh(0.5).unwrap();
                    }
                    match reads {
                        true => engine.full_grads(Scope::Global).map(drop).unwrap_err(),
                        false => engine.step().map(drop).unwrap_err(),
                    }
                }) {
                    let EngineError::BatchesDiffer { first, expected, second, got } = error else {
                        panic!("{error:?}")
                    };
                    assert_eq!((first, second), (Rank(last - 1), Rank(last)));
                    assert!(expected.starts_with("1 micro-batches"), "{expected}");
                    assert_eq!(got.contains("1.5"), weighs, "{got}");
                }
            });
        }
    }
}

/// A replicated parameter that the tensor axis' first rank used and its second did not.
#[test]
fn replicas_that_are_not_used_alike_are_refused_on_all_ranks() {
    let trial = on(&mesh(&[("tensor", 2)]), two_units(F32, |_, _| vec![]));
    each_stage(&trial, |trial| {
        each_rank(trial, |engine| {
            for param in [0, 1].into_iter().skip(rank_of(engine)) {
                let grad = GradIn { values: GradView::F32(&[1.0]), loss_scale: LossScale::ONE };
                engine.grad_ready(ParamId(param), grad).unwrap();
            }
            engine.backward_end().unwrap();
            let error = engine.step().unwrap_err();
            let EngineError::ReplicasDiffer { param, first, second } = &error else {
                panic!("{error:?}")
            };
            assert_eq!((first, second), (&Rank(0), &Rank(1)));
            assert_eq!(*param, trial.specs[0].name);
        });
    });
}

/// Two ranks hold each expert, and one of the first's writes to it.
#[test]
fn gradients_given_by_some_of_an_experts_ranks_are_refused_on_all_ranks() {
    let backward: Backward = |at, _| if at.param == 0 { vec![] } else { vec![vec![1.0]] };
    let layout = mesh(&[("data", 2), ("expert", 2)]);
    let mut trial = on(&layout, two_units(F32, backward));
    trial.specs[0].along = vec![Along::Reduced, Along::Distinct];
    each_stage(&trial, |trial| {
        each_rank(trial, |engine| {
            trial.micro_batch(engine, 0, 0).unwrap();
            for scope in [Scope::DataParallel, Scope::Global] {
                let mut grads = engine.full_grads(scope).unwrap();
                if rank_of(engine) == 2 {
                    grads.get_mut(ParamId(0)).unwrap();
                }
                let error = engine.set_full_grads(&grads).unwrap_err();
                let EngineError::GivenDiffer { first, second, .. } = &error else {
                    panic!("{error:?}")
                };
                assert_eq!((first, second), (&Rank(2), &Rank(0)));
            }
            // Those of the other expert may.
            let mut grads = engine.full_grads(Scope::DataParallel).unwrap();
            if rank_of(engine).is_multiple_of(2) {
                grads.get_mut(ParamId(0)).unwrap();
            }
            engine.set_full_grads(&grads).unwrap();
            engine.step().unwrap();
        });
    });
}

/// The second rank ran backward once more.
#[test]
fn passes_that_differ_along_a_tensor_axis_are_refused_on_all_ranks() {
    let trial = on(&mesh(&[("tensor", 2)]), two_units(F32, |_, _| vec![]));
    each_stage(&trial, |trial| {
        each_rank(trial, |engine| {
            for _ in 0..=rank_of(engine) {
                let grad = GradIn { values: GradView::F32(&[1.0]), loss_scale: LossScale::ONE };
                engine.grad_ready(ParamId(0), grad).unwrap();
                engine.backward_end().unwrap();
            }
            let error = engine.step().unwrap_err();
            assert!(matches!(error, EngineError::BatchesDiffer { .. }), "{error:?}");
        });
    });
}
