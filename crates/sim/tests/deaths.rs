//! A rank that dies or cannot go on: the others are told, and nobody hangs or goes on alone.

use std::thread;
use std::time::Duration;

use oxizero::{EngineError, EngineOptions, StepOutcome};
use oxizero_comm::CommError;
use oxizero_core::{DType, Overlap, ParamSpec, Precision, Rank, Stage, UnitId};
use oxizero_sim::layouts;
use oxizero_sim::opaque::Opaque;
use oxizero_sim::trial::Trial;
use oxizero_sim::watched::{Death, Plan};
use oxizero_sim::world;

#[test]
fn whenever_a_rank_dies_the_others_name_it() {
    let overlaps = [Overlap::Off, Overlap::On];
    for (stage, overlap) in Stage::ALL.into_iter().flat_map(|s| overlaps.map(|o| (s, o))) {
        let trial = Trial { ranks: 3, steps: 2, ..two_units(stage) };
        let (_, logs) = world::run_watched(3, Plan::default(), |comm| trial.engine(comm).is_ok());
        let operations = logs[1].operations().len();
        assert!(operations > 5, "{stage:?} has {operations} operations");
        for operation in 0..operations {
            let death = Death { rank: Rank(1), operation };
            let plan = Plan { death: Some(death), overlap, ..Plan::default() };
            let (ended, _) =
                world::run_watched(3, plan, |comm| trial.engine(comm).map(|(t, _)| t).err());
            let [first, dead, last] = &ended[..] else { panic!("three ranks") };
            assert!(matches!(dead, Some(EngineError::Comm(CommError::System { .. }))), "{dead:?}");
            for survivor in [first, last] {
                let named = matches!(
                    survivor,
                    Some(EngineError::Comm(CommError::PeerDead { rank: Rank(1), .. }))
                );
                // What was complete before the death may have been all that this rank needed.
                let done = survivor.is_none() && operation + 1 == operations;
                assert!(named || done, "{stage:?}, operation {operation}: {survivor:?}");
            }
        }
    }
}

/// Between two groups of two, the survivors learn of it whether the dead rank is of theirs or not.
#[test]
fn whenever_a_rank_of_a_mesh_dies_all_others_fail() {
    let overlaps = [Overlap::Off, Overlap::On];
    for (stage, overlap) in Stage::ALL.into_iter().flat_map(|s| overlaps.map(|o| (s, o))) {
        let options = EngineOptions::new(stage, Precision::of_model(DType::Bf16));
        let mesh = layouts::mesh(&[("data", 2), ("expert", 2)]);
        let trial = Trial { steps: 2, ..layouts::model_of(options, &mesh) };
        let (_, logs) = world::run_watched(4, Plan::default(), |comm| trial.engine(comm).is_ok());
        let operations = logs[2].operations().len();
        for operation in (0..operations).step_by(3) {
            let death = Some(Death { rank: Rank(2), operation });
            let plan = Plan { death, overlap, ..Plan::default() };
            let (ended, _) =
                world::run_watched(4, plan, |comm| trial.engine(comm).map(|(t, _)| t).err());
            for (rank, ended) in ended.into_iter().enumerate() {
                let dead = rank == 2;
                let Some(EngineError::Comm(error)) = ended else {
                    // What was complete before the death may have been all that a rank needed.
                    assert!(!dead && operation + 20 > operations, "{stage:?}, {operation}, {rank}");
                    continue;
                };
                let planned = matches!(error, CommError::System { .. });
                assert_eq!(planned, dead, "{stage:?}, operation {operation}, rank {rank}: {error}");
            }
        }
    }
}

/// A gather fails where it is waited for, and the shard that was lent to it is lost.
#[test]
fn after_a_gather_has_failed_every_call_says_so() {
    let trial = Trial { ranks: 2, ..two_units(Stage::Zero3) };
    for overlap in [Overlap::Off, Overlap::On] {
        let ended = world::run(2, |comm| {
            let rank = comm.rank();
            let mut engine = trial.start(world::placed(comm, overlap)).expect("the engine starts");
            if rank == Rank(1) {
                return Vec::new(); // and is gone
            }
            let reads = |engine: &mut oxizero::Engine| {
                engine.pre_forward(UnitId(0))?;
                engine.unit_weights(UnitId(0)).map(drop)
            };
            vec![reads(&mut engine), engine.discard_window(), reads(&mut engine)]
        });
        for result in &ended[0] {
            let failed = matches!(result, Err(EngineError::Comm(CommError::PeerDead { .. })));
            assert!(failed, "{overlap:?}: {result:?}");
        }
    }
}

/// Rank 1 keeps a view of its weights: nobody steps, and all may once it lets go.
#[test]
fn a_step_that_one_rank_refuses_is_taken_by_none_and_may_be_repeated() {
    for stage in [Stage::Zero0, Stage::Zero1, Stage::Zero2] {
        let trial = Trial { ranks: 2, ..two_units(stage) };
        let expected = trial.oracle().swap_remove(0).weights;
        for weights in world::run(2, |comm| {
            let rank = comm.rank();
            let mut engine = trial.start(comm).expect("the engine starts");
            trial.micro_batch(&mut engine, 0, 0).expect("nothing fails");
            let lent = (rank == Rank(1)).then(|| engine.unit_weights(UnitId(0)));
            match (rank, engine.step()) {
                (Rank(1), Err(EngineError::WeightsInUse { param })) => assert_eq!(param, "a"),
                (Rank(0), Err(EngineError::PeerRefused { rank })) => assert_eq!(rank, Rank(1)),
                (_, other) => panic!("{rank}: {other:?}"),
            }
            drop(lent);
            let outcome = engine.step().expect("the weights are free");
            assert!(matches!(outcome, StepOutcome::Applied { .. }), "{outcome:?}");
            trial.weights(&mut engine).expect("nothing fails")
        }) {
            assert_eq!(weights, expected, "{stage:?}");
        }
    }
}

/// Where a library moves the bytes.
#[test]
fn an_abort_by_another_thread_ends_the_operation_that_waits() {
    let ended = world::run(2, |comm| {
        let comm = Opaque::default().backend(comm).communicator;
        if comm.rank() == Rank(1) {
            thread::sleep(Duration::from_millis(500));
            return comm.barrier();
        }
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                comm.abort("the data ended");
            });
            comm.barrier()
        })
    });
    for ended in ended {
        match ended {
            Err(CommError::Aborted { rank: Rank(0), why }) => assert_eq!(why, "the data ended"),
            other => panic!("{other:?} instead of an abort"),
        }
    }
}

fn two_units(stage: Stage) -> Trial {
    let options = EngineOptions::new(stage, Precision::of_model(DType::Bf16));
    let params: [(&str, &[f32]); 3] = [("a", &[1.0; 5]), ("b", &[2.0; 3]), ("c", &[3.0])];
    let mut trial = Trial::new(options, &params, |at, weights| {
        vec![weights.iter().map(|weight| 0.25 * weight + at.rank as f32).collect()]
    });
    trial.specs[1] = ParamSpec::new("b", &[3], DType::Bf16, UnitId(0));
    trial.specs[2] = ParamSpec::new("c", &[1], DType::Bf16, UnitId(1));
    trial
}
