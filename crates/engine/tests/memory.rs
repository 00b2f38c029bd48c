//! What ranks hold is what the plan says, counted by the allocator and not by the engine's word.
//!
//! One test alone, for it reads a counter of the whole process.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;

use common::{NUMEL, OTHERS, REGIONS, REGIONS_PEAK, UNITS, chain, engine};
use oxizero::StepOutcome;
use oxizero::chain::Recompute;
use oxizero_comm::{Beside, Communicator, overlapped, threads};
use oxizero_core::{Bytes, DType, Stage, WorldSize};

/// Runs a world; returns the bytes of regions a rank at rest, and their peak.
fn measure(stage: Stage, model: DType, accumulation: usize, world_size: usize) -> (usize, usize) {
    measure_where(stage, model, accumulation, (world_size, |comm| comm))
}

/// Where the communicator of each rank is made another.
type Placed = fn(Box<dyn Communicator>) -> Box<dyn Communicator>;

fn measure_where(
    stage: Stage,
    model: DType,
    accumulation: usize,
    (world_size, placed): (usize, Placed),
) -> (usize, usize) {
    let start = Barrier::new(world_size);
    let rest = AtomicUsize::new(0);
    let before = REGIONS.load(SeqCst);
    REGIONS_PEAK.store(before, SeqCst);
    thread::scope(|scope| {
        for comm in threads::group(WorldSize::new(world_size).unwrap()) {
            let (start, rest) = (&start, &rest);
            scope.spawn(move || {
                let mut engine = engine(stage, model, accumulation, placed(comm));
                let chain = chain();
                for _ in 0..2 {
                    for _ in 0..accumulation {
                        chain.train(&mut engine, &(), Recompute::Always, 0).unwrap();
                        let outcome = engine.step().unwrap();
                        assert!(!matches!(outcome, StepOutcome::Skipped { .. }));
                    }
                    start.wait();
                    rest.store(REGIONS.load(SeqCst) - before, SeqCst);
                    assert_eq!(engine.memory().total(), engine.plan().rest.total());
                    start.wait();
                }
            });
        }
    });
    assert_eq!(REGIONS.load(SeqCst), before, "every region is given back");
    (rest.load(SeqCst) / world_size, (REGIONS_PEAK.load(SeqCst) - before) / world_size)
}

#[test]
fn ranks_hold_what_the_plan_says() {
    // By hand, for 4 parameters of 65,536 elements on two ranks with AdamW: bf16 weights of two
    // bytes, f32 accumulators, masters and two moments of four bytes.
    let s = UNITS * NUMEL;
    for (stage, rest) in [
        (Stage::Zero0, 2 * s + 4 * s + 12 * s),
        (Stage::Zero1, 2 * s + 4 * s + 12 * s / 2),
        (Stage::Zero2, 2 * s + 4 * s / 2 + 12 * s / 2),
        (Stage::Zero3, 2 * s / 2 + 4 * s / 2 + 12 * s / 2),
    ] {
        for accumulation in [1, 2] {
            assert_eq!(measure(stage, DType::Bf16, accumulation, 2).0, rest, "{stage:?}");
        }
    }
    // f32 weights are their own masters.
    for (stage, rest) in [
        (Stage::Zero0, 4 * s + 4 * s + 8 * s),
        (Stage::Zero1, 4 * s + 4 * s + 8 * s / 2),
        (Stage::Zero2, 4 * s + 4 * s / 2 + 8 * s / 2),
        (Stage::Zero3, 4 * s / 2 + 4 * s / 2 + 8 * s / 2),
    ] {
        assert_eq!(measure(stage, DType::F32, 1, 2).0, rest, "{stage:?}");
    }
    peaks();
    let others = OTHERS.load(SeqCst);
    assert!(others < 1 << 20, "{others} bytes outside of regions: a tensor hides there");
}

/// Operations run on a thread of their own.
fn beside(comm: Box<dyn Communicator>) -> Box<dyn Communicator> {
    overlapped(comm, Beside::default()).unwrap()
}

/// Alone, where the thread back end copies nothing, a rank peaks where the plan says.
fn peaks() {
    for stage in Stage::ALL {
        for model in [DType::Bf16, DType::F32] {
            for accumulation in [1, 2] {
                let (_, peak) = measure(stage, model, accumulation, 1);
                let group = threads::group(WorldSize::ONE).pop().unwrap();
                let plan = engine(stage, model, accumulation, group).plan();
                assert_eq!(Bytes(peak), plan.peak_total(), "{stage:?}: {plan:?}");
                let (_, peak) = measure_where(stage, model, accumulation, (1, beside));
                let group = beside(threads::group(WorldSize::ONE).pop().unwrap());
                let plan = engine(stage, model, accumulation, group).plan();
                // What is in flight may have ended when the next is collected.
                assert!(Bytes(peak) <= plan.peak_total(), "{peak} of {plan:?}");
            }
        }
    }
}
