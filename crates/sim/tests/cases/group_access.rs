//! Gradients, weights and states of process groups that are edited.

use super::groups::{each_rank, on};
use super::*;
use oxizero::{Along, OptimizerSetup, ViewMut};
use oxizero_optim::{LrSchedule, Momentum, Sgd};
use oxizero_sim::layouts::{self, mesh};
use oxizero_sim::round;
use oxizero_sim::trial::Reads;

use Along::{Distinct, Reduced, Replicated};

/// Calls `act` on every rank of every arrangement in every stage, after the first micro-batch.
fn each_layout(precision: Precision, act: impl Fn(&Trial, &mut Engine) + Sync) {
    for mesh in layouts::meshes() {
        let options = EngineOptions::new(Stage::Zero0, precision);
        let trial = layouts::model_of(options, &mesh);
        for stage in Stage::ALL {
            println!("{}, {stage:?}", layouts::name(&mesh));
            let trial = in_stage(&trial, stage);
            let ended = world::run(trial.ranks, |comm| {
                let mut engine = trial.start(comm).expect("the engine starts");
                trial.micro_batch(&mut engine, 0, 0).expect("nothing fails");
                act(&trial, &mut engine);
                engine // no rank leaves before all are done
            });
            drop(ended);
        }
    }
}

fn global(engine: &mut Engine) -> Vec<Option<Vec<f32>>> {
    let grads = engine.full_grads(Scope::Global).expect("the window is complete");
    let params = (0..engine.params().len()).map(ParamId);
    params.map(|param| grads.get(param).map(to_f32)).collect()
}

fn scaled(values: &[f32], factor: f32) -> Vec<f32> {
    values.iter().map(|value| factor * value).collect()
}

/// However they are edited: elementwise, in parts, one by one, all at once.
#[test]
fn half_the_gradients_of_any_group_have_half_the_norms() {
    let halve: [fn(&mut Engine); 5] = [
        |engine| {
            let halve = |_: ParamId, _: std::ops::Range<usize>, values: ViewMut<'_>| {
                let ViewMut::F32(values) = values else { panic!("f32 was asked for") };
                values.iter_mut().for_each(|value| *value *= 0.5);
            };
            engine.map_grads(halve).unwrap();
        },
        |engine| {
            for param in (0..engine.params().len()).map(ParamId) {
                let Some(local) = engine.local_grad(param).unwrap() else { continue };
                let half = scaled(&to_f32(local.values()), 0.5);
                engine.set_local_grad(param, GradView::F32(&half)).unwrap();
            }
        },
        |engine| {
            for param in (0..engine.params().len()).map(ParamId) {
                let Some(grad) = engine.full_grad(param).unwrap() else { continue };
                let half = scaled(grad.f32(), 0.5);
                engine.set_full_grad(param, GradView::F32(&half)).unwrap();
            }
        },
        |engine| halve_all(engine, Scope::DataParallel),
        |engine| halve_all(engine, Scope::Global),
    ];
    let precision = Precision { model: BF16, reduce: F32, ..Precision::of_model(BF16) };
    for halve in halve {
        each_layout(precision, |_, engine| {
            let (before, norms) = (global(engine), engine.grad_norms().unwrap());
            halve(engine);
            let half: Vec<_> =
                before.iter().map(|grad| grad.as_ref().map(|grad| scaled(grad, 0.5))).collect();
            assert_eq!(global(engine), half);
            let half: Vec<_> = norms.iter().map(|norm| norm.map(|norm| norm / 2.0)).collect();
            assert_eq!(engine.grad_norms().unwrap(), half);
            let all: f64 = half.iter().flatten().map(|norm| norm * norm).sum();
            let StepOutcome::Applied { norm_before, .. } = engine.step().unwrap() else {
                panic!("the gradients are finite")
            };
            assert!((norm_before / all.sqrt() - 1.0).abs() < 1e-12);
        });
    }
}

fn halve_all(engine: &mut Engine, scope: Scope) {
    let mut grads = engine.full_grads(scope).expect("the window is complete");
    for param in (0..engine.params().len()).map(ParamId) {
        if let Some(ViewMut::F32(values)) = grads.get_mut(param) {
            values.iter_mut().for_each(|value| *value *= 0.5);
        }
    }
    engine.set_full_grads(&grads).expect("they are the engine's own");
}

/// Each rank's own part of them.
#[test]
fn masters_and_states_of_any_group_are_what_they_were_set_to() {
    each_layout(Precision::of_model(BF16), |trial, engine| {
        engine.step().unwrap();
        let rank = engine.communicator().rank().0;
        for param in (0..engine.params().len()).map(ParamId) {
            let Some(master) = engine.full_param(param).unwrap() else { continue };
            let twice = scaled(master.f32(), 2.0);
            engine.set_full_param(param, GradView::F32(&twice)).unwrap();
            assert_eq!(engine.full_param(param).unwrap().unwrap().f32(), twice);
            let state = engine.full_state(param, "exp_avg").unwrap().unwrap();
            let other = scaled(state.f32(), -3.0);
            engine.set_full_state(param, "exp_avg", GradView::F32(&other)).unwrap();
            assert_eq!(engine.full_state(param, "exp_avg").unwrap().unwrap().f32(), other);
            let local = engine.local_state(param, "exp_avg").unwrap().unwrap();
            assert_eq!(to_f32(local.values()), other[local.elements]);
            let local = engine.local_param(param).unwrap().unwrap();
            assert_eq!(to_f32(local.values()), twice[local.elements]);
        }
        let weights = trial.weights(engine).unwrap();
        for (param, weights) in weights.iter().enumerate() {
            if let Some(master) = engine.full_param(ParamId(param)).unwrap() {
                let dtype = trial.specs[param].dtype;
                let right: Vec<_> =
                    master.f32().iter().map(|weight| round(*weight, dtype)).collect();
                assert_eq!(*weights, right, "rank {rank}");
            }
        }
    });
}

/// Those of the first rank of those that hold the same, whatever the others have.
#[test]
fn ranks_that_hold_the_same_start_with_the_firsts_weights() {
    let trial = two_units(BF16, |_, _| vec![vec![0.0]]);
    let mesh = mesh(&[("data", 2), ("expert", 2), ("tensor", 2)]);
    let along: [&[Along]; 2] = [&[], &[Reduced, Distinct, Replicated]];
    let trial = on(&mesh, &along, trial);
    for stage in Stage::ALL {
        let trial = in_stage(&trial, stage);
        for (rank, weights) in world::run(8, |comm| {
            let rank = comm.rank().0;
            let mut initial = |_: ParamId, weights: &mut [f32]| weights.fill(1.0 + rank as f32);
            let optimizer = OptimizerSetup {
                rule: Box::new(Sgd::new(Momentum::Classical(0.0)).unwrap()),
                groups: trial.groups.clone(),
                schedule: LrSchedule::constant(0),
            };
            let (specs, options) = (trial.specs.clone(), trial.options.clone());
            let order = trial.order();
            let mut engine =
                Engine::new(specs, order, options, optimizer, comm, &mut initial).unwrap();
            (rank, trial.weights(&mut engine).unwrap())
        }) {
            assert_eq!(weights, [[1.0], [[1.0, 3.0][rank / 2 % 2]]]);
        }
    }
}

/// An expert that nobody used stays as it is when what was read is set back, and moves once its
/// gradient was written.
#[test]
fn an_unused_expert_is_updated_only_if_its_gradient_was_written() {
    let backward: Backward = |at, _| match at.param {
        0 => vec![],
        _ => vec![vec![1.0]],
    };
    let mut trial = on(&mesh(&[("expert", 2)]), &[&[Distinct], &[]], two_units(F32, backward));
    trial.initial = vec![vec![1.0, 2.0], vec![1.0]];
    trial.groups = vec![GroupOptions { lr: 0.5, weight_decay: 0.5 }];
    for reads in [Reads::All, Reads::SetBack] {
        each_rank(&Trial { reads, ..trial.clone() }, |rank, trained| {
            assert_eq!(trained.weights, [[[1.0, 2.0][rank]], [0.25]]);
        });
    }
    each_stage(&trial, |trial| {
        for (weights, rank) in world::run(2, |comm| {
            let mut engine = trial.start(comm).unwrap();
            trial.micro_batch(&mut engine, 0, 0).unwrap();
            let mut seen = vec![];
            engine.map_grads(|param, _, _| seen.push(param)).unwrap();
            assert!(seen.iter().all(|param| *param == ParamId(1)), "{seen:?}");
            let mut grads = engine.full_grads(Scope::DataParallel).unwrap();
            assert!(grads.get_mut(ParamId(0)).is_some());
            engine.set_full_grads(&grads).unwrap();
            engine.step().unwrap();
            (trial.weights(&mut engine).unwrap(), engine.communicator().rank().0)
        }) {
            assert_eq!(weights, [[[0.75, 1.5][rank]], [0.25]]);
        }
    });
}
