//! An engine on a device that the host cannot look into.

use super::*;
use oxizero_sim::drawn;
use oxizero_sim::opaque::Opaque;

fn trained_on(device: &Opaque, trial: &Trial) -> Vec<Trained> {
    world::run(trial.ranks, |comm| {
        let member = trial.member_on(device, comm).expect("the rule is possible");
        match trial.engine_of(member) {
            Ok((trained, _)) => trained,
            Err(error) => panic!("{error}"),
        }
    })
}

fn assert_same_as_on_the_host(trial: &Trial, context: &str) {
    let on_host = trial.run();
    for (trained, expected) in trained_on(&Opaque::default(), trial).iter().zip(&on_host) {
        assert_same(trial, trained, expected, context);
        // Norms too: they are added by the same pieces.
        let norms = |of: &Trained| {
            let bits = |norm: f64| if norm.is_nan() { f64::NAN.to_bits() } else { norm.to_bits() };
            of.outcomes.iter().map(|outcome| outcome.map(bits)).collect::<Vec<_>>()
        };
        assert_eq!(norms(trained), norms(expected), "{context}");
    }
}

#[test]
fn every_stage_trains_to_the_same_bits_as_on_the_host() {
    for stage in Stage::ALL {
        for model in [DType::F32, DType::Bf16] {
            for (ranks, accumulation) in [(1, 1), (2, 3), (3, 1)] {
                let options = EngineOptions {
                    accumulation,
                    clip_norm: Some(2.5),
                    ..EngineOptions::new(stage, Precision::of_model(model))
                };
                let trial = Trial { ranks, ..model_of(options) };
                assert_same_as_on_the_host(&trial, &format!("{stage:?} {model} of {ranks}"));
            }
        }
    }
}

#[test]
fn whatever_is_drawn_trains_to_the_same_bits_as_on_the_host() {
    for seed in 0..100 {
        println!("seed {seed}"); // the last one that is printed is the one that failed
        assert_same_as_on_the_host(&drawn::any(seed), &format!("seed {seed}"));
    }
}

#[test]
fn a_step_reads_the_device_once() {
    for stage in Stage::ALL {
        let options = EngineOptions {
            accumulation: 2,
            clip_norm: Some(2.5),
            bucketing: Bucketing::Bytes(Bytes(40)),
            ..EngineOptions::new(stage, Precision::of_model(DType::Bf16))
        };
        let trial = Trial { ranks: 2, reads: Reads::None, ..model_of(options) };
        let reads = world::run(2, |comm| {
            let device = Opaque::default();
            let member = trial.member_on(&device, comm).expect("the rule is possible");
            let mut engine = trial.start_of(member).expect("nothing fails");
            let before = device.reads();
            // What the trial itself reads are the weights from which it makes gradients.
            let of_trial = 2 * trial.specs.iter().filter(|spec| spec.trainable).count();
            for step in 0..trial.steps {
                trial.window(&mut engine, step).expect("nothing fails");
            }
            (device.reads() - before, trial.steps * (of_trial + 1))
        });
        assert!(reads.iter().all(|(read, expected)| read == expected), "{stage:?}: {reads:?}");
    }
}
