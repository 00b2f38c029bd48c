//! Whatever was drawn is loaded in another world of another stage, and is the same by name.

use oxizero::{
    Along, Batches, EngineOptions, GroupOptions, Mesh, MeshAxis, ParamSpec, Precision, UnitId,
    WorldSize,
};
use oxizero_core::{DType, Random, Stage};
use oxizero_sim::drawn::{self, Chosen};
use oxizero_sim::odd::ADAMW;
use oxizero_sim::opaque::Opaque;
use oxizero_sim::trial::{Trial, full_windows};
use oxizero_sim::world;

use super::{State, backward, contents, load, save, state_of, train};

const SEEDS: u64 = 48;

/// A model of one world, and the same model in another.
fn pair(seed: u64) -> (Trial, Trial) {
    let mut draw = Random::for_path(seed, &[99]);
    let mut of = |count: u64| (draw.next_u64() % count) as usize;
    let mut chosen = || Chosen {
        stage: Stage::ALL[of(4)],
        precision: Precision::of_model(DType::ALL[of(3)]),
        ranks: 1 + of(12),
        mesh: None,
    };
    let (first, second) = (chosen(), chosen());
    let writer = drawn::of(seed, first);
    let other = drawn::of(seed + 1, second.clone());
    let mut reader = Trial { options: other.options, ranks: other.ranks, ..writer.clone() };
    reader.options.loss_scaling = writer.options.loss_scaling;
    reader.options.check_finite = writer.options.check_finite;
    for spec in reader.specs.iter_mut().filter(|spec| spec.trainable) {
        // A frozen weight is stored as it is, and would be rounded.
        spec.dtype = second.precision.model;
    }
    for values in &mut reader.initial {
        values.iter_mut().for_each(|value| *value += 1.0);
    }
    (writer, reader)
}

#[test]
fn whatever_was_saved_is_loaded_in_any_world_and_stage() {
    for seed in 0..SEEDS {
        println!("seed {seed}"); // the last one that is printed is the one that failed
        let (writer, reader) = pair(seed);
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [first, second] = folders.each_ref().map(|folder| folder.path());
        let saved = world::run(writer.ranks, |comm| {
            let mut engine = writer.start(comm).unwrap();
            train(&writer, &mut engine, 0..2);
            save(&mut engine, first).unwrap();
            state_of(&writer, &mut engine)
        });
        let loaded = world::run(reader.ranks, |comm| {
            let on_device = seed % 5 == 0;
            let device = Opaque::default();
            let member = match on_device {
                true => reader.member_on(&device, comm).unwrap(),
                false => reader.member(comm).unwrap(),
            };
            let mut engine = reader.start_of(member).unwrap();
            let loaded = load(&mut engine, first).unwrap();
            assert!(loaded.missing.is_empty() && loaded.unexpected.is_empty());
            save(&mut engine, second).unwrap();
            state_of(&reader, &mut engine)
        });
        for found in loaded {
            let State { states, applied_steps, loss_scale, .. } = &saved[0];
            assert_eq!(found.states, *states, "seed {seed}");
            assert_eq!((found.applied_steps, found.loss_scale), (*applied_steps, *loss_scale));
        }
        assert_eq!(contents(second), contents(first), "seed {seed}");
    }
}

/// Three axes with so many ranks: data, tensor and expert.
fn mesh(sizes: [usize; 3]) -> Mesh {
    let axis = |(name, batches, size)| MeshAxis::new(name, WorldSize::new(size).unwrap(), batches);
    let axes = [
        ("data", Batches::Different, sizes[0]),
        ("tensor", Batches::Same, sizes[1]),
        ("expert", Batches::Different, sizes[2]),
    ];
    Mesh::new(axes.map(axis).into()).unwrap()
}

/// A model in parts; the shapes are those of the wholes.
fn in_parts(stage: Stage, sizes: [usize; 3]) -> Trial {
    use Along::{Distinct, Reduced, Replicated, Split};
    let mesh = mesh(sizes);
    let spec = |unit: usize, name: &str, whole: &[usize], along: [Along; 3]| {
        let mut shape = whole.to_vec();
        for (along, size) in along.iter().zip(sizes) {
            if let Split { dim } = along {
                shape[*dim] /= size;
            }
        }
        let along = along.to_vec();
        ParamSpec { along, ..ParamSpec::new(name, &shape, DType::Bf16, UnitId(unit)) }
    };
    let mut specs = vec![
        spec(0, "columns", &[5, 12], [Reduced, Split { dim: 1 }, Reduced]),
        spec(0, "norm", &[7], [Reduced, Replicated, Reduced]),
        spec(1, "rows", &[12, 3], [Reduced, Split { dim: 0 }, Reduced]),
        spec(1, "experts", &[4, 4], [Reduced, Split { dim: 1 }, Distinct]),
        spec(2, "both", &[4, 3, 4], [Reduced, Split { dim: 0 }, Split { dim: 2 }]),
        spec(2, "frozen", &[6, 4], [Reduced, Split { dim: 1 }, Reduced]),
    ];
    specs[5].trainable = false;
    let initial = |(index, spec): (usize, &ParamSpec)| {
        let mut random = Random::for_path(5, &[index as u64]);
        (0..spec.numel().0 * 8).map(|_| random.normal()).collect()
    };
    let options = EngineOptions {
        mesh: Some(mesh),
        ..EngineOptions::new(stage, Precision::of_model(DType::Bf16))
    };
    let trial = Trial::new(options, &[], backward);
    Trial {
        initial: specs.iter().enumerate().map(initial).collect(),
        specs,
        rule: ADAMW,
        groups: vec![GroupOptions { lr: 0.1, weight_decay: 0.1 }],
        ranks: sizes.iter().product(),
        windows: full_windows,
        ..trial
    }
}

#[test]
fn tensors_in_parts_are_loaded_in_other_parts() {
    let meshes = [[1, 1, 2], [2, 2, 2], [1, 4, 2], [3, 2, 2], [2, 1, 2]];
    for (index, from) in meshes.iter().enumerate() {
        let writer = in_parts(Stage::ALL[index % 4], *from);
        let folder = tempfile::tempdir().unwrap();
        world::run(writer.ranks, |comm| {
            let mut engine = writer.start(comm).unwrap();
            train(&writer, &mut engine, 0..2);
            save(&mut engine, folder.path()).unwrap();
        });
        for (other, to) in meshes.iter().enumerate() {
            let reader = in_parts(Stage::ALL[(index + other + 1) % 4], *to);
            let again = tempfile::tempdir().unwrap();
            world::run(reader.ranks, |comm| {
                let mut engine = reader.start(comm).unwrap();
                load(&mut engine, folder.path()).unwrap();
                save(&mut engine, again.path()).unwrap();
            });
            let (found, expected) = (contents(again.path()), contents(folder.path()));
            assert_eq!(found.0, expected.0, "{from:?} to {to:?}");
        }
    }
}

#[test]
fn parts_lie_in_the_whole_as_the_mesh_says() {
    let trial = in_parts(Stage::Zero1, [1, 2, 2]);
    let folder = tempfile::tempdir().unwrap();
    let parts = world::run(4, |comm| {
        let mut engine = trial.start(comm).unwrap();
        save(&mut engine, folder.path()).unwrap();
        trial.weights(&mut engine).unwrap().swap_remove(0)
    });
    let mut checkpoint = oxizero::RunFolder::new(folder.path()).open(None).unwrap();
    let whole = super::weights_of(&mut checkpoint, "columns");
    // Ranks 0 and 2 are the two along `tensor`; each has six of the twelve columns.
    let row = |row: usize| [&parts[0][6 * row..6 * row + 6], &parts[2][6 * row..6 * row + 6]];
    let expected: Vec<f32> = (0..5).flat_map(row).flatten().copied().collect();
    let rounded: Vec<f32> = whole.iter().map(|value| f32::from_bits(round(*value))).collect();
    assert_eq!(rounded, expected);
}

/// To bf16, to nearest even.
fn round(value: f32) -> u32 {
    let bits = value.to_bits();
    (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000
}
