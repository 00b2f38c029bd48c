//! Faults that people met with checkpoints of sharded training, and the right values.

use oxizero::{
    EngineOptions, GroupOptions, LoadOptions, RunFolder, SaveOptions, StepOutcome, StoredBuffer,
    What, checkpoints,
};
use oxizero_core::GlobalBatch;
use oxizero_core::{
    Bytes, DType, OptimGroup, ParamId, ParamSpec, Precision, Stage, UnitId, WorldSize,
};
use oxizero_sim::odd::ADAMW;
use oxizero_sim::trial::{Trial, to_f32};
use oxizero_sim::world;

use super::{load, save, state_of, train, weights_of};

fn options(stage: Stage, model: DType) -> EngineOptions {
    EngineOptions { align: Bytes(1), ..EngineOptions::new(stage, Precision::of_model(model)) }
}

/// The same gradient of few bits on every rank, so that a step is the same in every world.
fn seven(stage: Stage, model: DType, ranks: usize) -> Trial {
    let weights: Vec<f32> = (0..7).map(|index| 1.0 + index as f32).collect();
    let backward = |_, weights: &[f32]| vec![vec![0.75; weights.len()]];
    let trial = Trial::new(options(stage, model), &[("w", &weights)], backward);
    let groups = vec![GroupOptions { lr: 0.125, weight_decay: 0.5 }];
    Trial { ranks, rule: ADAMW, groups, ..trial }
}

#[test]
fn seven_elements_of_two_ranks_are_loaded_by_three_four_and_eight() {
    for stage in Stage::ALL {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let writer = seven(stage, DType::F32, 2);
        let expected = world::run(2, |comm| {
            let mut engine = writer.start(comm).unwrap();
            train(&writer, &mut engine, 0..3);
            save(&mut engine, path).unwrap();
            let saved = state_of(&writer, &mut engine);
            train(&writer, &mut engine, 3..4);
            (saved, state_of(&writer, &mut engine))
        });
        for ranks in [3, 4, 8] {
            for stage in Stage::ALL {
                let reader = seven(stage, DType::F32, ranks);
                let found = world::run(ranks, |comm| {
                    let mut engine = reader.start(comm).unwrap();
                    load(&mut engine, path).unwrap();
                    let loaded = state_of(&reader, &mut engine);
                    assert_eq!(loaded.applied_steps, 3);
                    train(&reader, &mut engine, 3..4);
                    (loaded, state_of(&reader, &mut engine))
                });
                assert!(found.iter().all(|found| *found == expected[0]), "{stage:?} of {ranks}");
            }
        }
    }
}

#[test]
fn interleaved_groups_are_exported_by_name() {
    let names = ["a", "b", "c", "d"];
    let values = [[1.0_f32], [2.0], [3.0], [4.0]];
    let params: Vec<(&str, &[f32])> =
        names.iter().copied().zip(values.iter().map(|v| &v[..])).collect();
    for stage in Stage::ALL {
        for ranks in 1..=3 {
            let folder = tempfile::tempdir().unwrap();
            let mut trial = Trial::new(options(stage, DType::F32), &params, |_, _| vec![]);
            for (index, spec) in trial.specs.iter_mut().enumerate() {
                spec.group = OptimGroup(index % 2);
                spec.unit = UnitId(0);
            }
            trial.groups.push(GroupOptions { lr: 0.5, weight_decay: 0.0 });
            world::run(ranks, |comm| {
                save(&mut trial.start(comm).unwrap(), folder.path()).unwrap();
            });
            let mut checkpoint = RunFolder::new(folder.path()).open(None).unwrap();
            let found = names.map(|name| weights_of(&mut checkpoint, name));
            assert_eq!(found, [[1.0], [2.0], [3.0], [4.0]], "{stage:?} of {ranks}");
        }
    }
}

#[test]
fn weights_without_optimizer_states_stay_through_a_step_of_learning_rate_zero() {
    for stage in Stage::ALL {
        for model in [DType::F32, DType::Bf16] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path();
            let trial = seven(stage, model, 2);
            world::run(2, |comm| {
                let mut engine = trial.start(comm).unwrap();
                train(&trial, &mut engine, 0..2);
                save(&mut engine, path).unwrap();
                let saved = state_of(&trial, &mut engine);
                // Masters and moments that are far away.
                train(&trial, &mut engine, 2..9);
                let before = state_of(&trial, &mut engine);
                let options = LoadOptions { what: What::Weights, ..LoadOptions::default() };
                engine.load(&RunFolder::new(path), None, options).unwrap();
                let loaded = state_of(&trial, &mut engine);
                assert_eq!(loaded.weights, saved.weights);
                assert_eq!(loaded.states[0][0], saved.states[0][0], "masters follow");
                assert_eq!(loaded.states[0][1..], before.states[0][1..], "moments stay");
                assert_eq!(loaded.applied_steps, 9);
                engine
                    .set_group(OptimGroup(0), GroupOptions { lr: 0.0, weight_decay: 0.5 })
                    .unwrap();
                train(&trial, &mut engine, 9..10);
                assert_eq!(state_of(&trial, &mut engine).weights, saved.weights);
            });
        }
    }
}

#[test]
fn step_six_after_a_resume_is_that_of_the_uninterrupted_run() {
    for stage in Stage::ALL {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let trial = seven(stage, DType::Bf16, 3);
        world::run(3, |comm| {
            let mut engine = trial.start(comm).unwrap();
            train(&trial, &mut engine, 0..5);
            save(&mut engine, path).unwrap();
        });
        let resumed = world::run(3, |comm| {
            let mut engine = trial.start(comm).unwrap();
            load(&mut engine, path).unwrap();
            let outcomes = train(&trial, &mut engine, 5..6);
            (outcomes, state_of(&trial, &mut engine))
        });
        let straight = world::run(3, |comm| {
            let mut engine = trial.start(comm).unwrap();
            let mut outcomes = train(&trial, &mut engine, 0..6);
            (outcomes.split_off(5), state_of(&trial, &mut engine))
        });
        assert_eq!(resumed, straight, "{stage:?}");
    }
}

#[test]
fn tied_and_frozen_parameters_and_buffers_are_stored_once() {
    let params: [(&str, &[f32]); 2] = [("embed", &[1.0, 2.0]), ("frozen", &[3.0, 4.0, 5.0])];
    let buffer = StoredBuffer {
        name: "positions".into(),
        shape: vec![2],
        dtype: checkpoints::Dtype::I64,
        bytes: [7_i64, -1].iter().flat_map(|value| value.to_le_bytes()).collect(),
    };
    for stage in Stage::ALL {
        let folder = tempfile::tempdir().unwrap();
        let mut trial = Trial::new(options(stage, DType::Bf16), &params, |_, _| vec![]);
        trial.specs[0].aliases = vec!["head".into()];
        trial.specs[1].trainable = false;
        world::run(4, |comm| {
            let mut engine = trial.start(comm).unwrap();
            let options = SaveOptions {
                caller: "position 17".into(),
                own: engine.communicator().rank().0.into(),
                buffers: vec![buffer.clone()],
                ..SaveOptions::default()
            };
            engine.save(&RunFolder::new(folder.path()), &options).unwrap();
        });
        let bytes: u64 = std::fs::read_dir(folder.path().join("step-000000"))
            .unwrap()
            .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
            .filter(|text| text[8] == b'{')
            .map(|text| text.len() as u64 - 8 - u64::from_le_bytes(text[..8].try_into().unwrap()))
            .sum();
        // A master of two f32, three bf16, two i64.
        assert_eq!(bytes, 8 + 6 + 16, "{stage:?}");
        // A model that uses the other name, and has more ranks than elements.
        let mut reader = Trial::new(options(stage, DType::Bf16), &params, |_, _| vec![]);
        reader.specs[0] = ParamSpec { name: "head".into(), ..reader.specs[0].clone() };
        reader.specs[1].trainable = false;
        reader.initial = vec![vec![0.0; 2], vec![0.0; 3]];
        world::run(6, |comm| {
            let mut engine = reader.start(comm).unwrap();
            let mut loaded = load(&mut engine, folder.path()).unwrap();
            assert_eq!(reader.weights(&mut engine).unwrap(), [vec![1.0, 2.0], vec![3.0, 4.0, 5.0]]);
            let checkpoint = &mut loaded.checkpoint;
            assert_eq!(checkpoint.manifest().caller, "position 17");
            assert_eq!(checkpoint.manifest().ranks, [0, 1, 2, 3].map(checkpoints::Value::from));
            let found = checkpoint.find(&checkpoints::Role::Buffer, "positions").unwrap();
            assert_eq!(checkpoint.read_whole(found).unwrap(), buffer.bytes);
        });
    }
}

#[test]
fn a_frozen_parameter_may_have_been_trained_and_the_other_way_round() {
    let params: [(&str, &[f32]); 2] = [("a", &[1.0, 2.0, 3.0]), ("b", &[4.0])];
    let folder = tempfile::tempdir().unwrap();
    let trial = |trained: usize, values: f32| {
        let mut trial = Trial::new(options(Stage::Zero2, DType::F32), &params, |_, _| vec![]);
        trial.specs[1 - trained].trainable = false;
        trial.initial.iter_mut().flatten().for_each(|value| *value *= values);
        trial
    };
    world::run(2, |comm| save(&mut trial(0, 1.0).start(comm).unwrap(), folder.path()).unwrap());
    world::run(3, |comm| {
        let reader = trial(1, 0.0);
        let mut engine = reader.start(comm).unwrap();
        let options = LoadOptions { what: What::Weights, ..LoadOptions::default() };
        engine.load(&RunFolder::new(folder.path()), None, options).unwrap();
        assert_eq!(reader.weights(&mut engine).unwrap(), [vec![1.0, 2.0, 3.0], vec![4.0]]);
        assert_eq!(to_f32(engine.full_param(ParamId(1)).unwrap().unwrap().view()), [4.0]);
    });
}

#[test]
fn eight_ranks_are_gone_on_from_by_six_with_the_same_global_batch() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let batch = GlobalBatch { samples: 24, micro_batch: 1 };
    let world = |ranks: usize| {
        let accumulation = batch.accumulation(WorldSize::new(ranks).unwrap()).unwrap();
        let mut trial = seven(Stage::Zero2, DType::F32, ranks);
        trial.options.accumulation = accumulation;
        trial
    };
    let eight = world(8);
    world::run(8, |comm| {
        let mut engine = eight.start(comm).unwrap();
        train(&eight, &mut engine, 0..2);
        save(&mut engine, path).unwrap();
    });
    let six = world(6);
    assert_eq!((eight.options.accumulation, six.options.accumulation), (3, 4));
    world::run(6, |comm| {
        let mut engine = six.start(comm).unwrap();
        load(&mut engine, path).unwrap();
        let outcomes = train(&six, &mut engine, 2..3);
        assert!(matches!(outcomes[0], StepOutcome::Applied { .. }));
        assert_eq!(engine.applied_steps(), 3);
    });
    assert!(batch.accumulation(WorldSize::new(5).unwrap()).is_err());
}
