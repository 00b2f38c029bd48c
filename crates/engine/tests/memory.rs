//! What ranks hold is what the plan says, counted by the allocator and not by the engine's word.
//!
//! One test alone, for it reads a counter of the whole process. Regions are the only allocations
//! on a multiple of 64 bytes, so that they are told from the test's own.
#![expect(unsafe_code, reason = "a global allocator that counts")]
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread;

use oxizero::chain::{Chain, Link, Recompute};
use oxizero::segment::{GradSink, Input, Segment};
use oxizero::{
    Engine, EngineError, EngineOptions, GradView, GroupOptions, OptimizerSetup, StepOutcome,
};
use oxizero_comm::{Communicator, threads};
use oxizero_core::{Bytes, DType, ParamSpec, Precision, Stage, UnitId, WorldSize};
use oxizero_optim::{AdamW, LrSchedule, MomentOptions};

struct Counting;

static REGIONS: AtomicUsize = AtomicUsize::new(0);
static REGIONS_PEAK: AtomicUsize = AtomicUsize::new(0);
static OTHERS: AtomicUsize = AtomicUsize::new(0);

fn counter(layout: &Layout) -> &'static AtomicUsize {
    if layout.align() == 64 { &REGIONS } else { &OTHERS }
}

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = counter(&layout).fetch_add(layout.size(), SeqCst) + layout.size();
        if layout.align() == 64 {
            REGIONS_PEAK.fetch_max(live, SeqCst);
        }
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        counter(&layout).fetch_sub(layout.size(), SeqCst);
        // SAFETY: as the caller's.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const NUMEL: usize = 4096;
const UNITS: usize = 4;

/// A segment whose parameter's gradient is its weights; f32 as most frameworks give it.
struct Echo;

impl Segment for Echo {
    type Batch = ();
    type Value = ();
    type Tape = ();

    fn infer(&self, _: Input<'_, Self>) {}

    fn forward(&self, _: Input<'_, Self>) -> ((), ()) {
        ((), ())
    }

    fn backward(
        &self,
        (): (),
        _: Option<()>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<()>, EngineError> {
        sink.grad(0, GradView::F32(&[1.0; NUMEL]))?;
        Ok(Some(()))
    }
}

/// Units of one parameter each; a tied head reads the first unit again.
fn engine(stage: Stage, model: DType, accumulation: usize, comm: Box<dyn Communicator>) -> Engine {
    let spec = |unit| ParamSpec {
        contributions: if unit == 0 { 2 } else { 1 },
        ..ParamSpec::new(format!("p{unit}"), &[NUMEL], model, UnitId(unit))
    };
    let options =
        EngineOptions { accumulation, ..EngineOptions::new(stage, Precision::of_model(model)) };
    let optimizer = OptimizerSetup {
        rule: Box::new(AdamW::new(MomentOptions::default()).unwrap()),
        groups: vec![GroupOptions { lr: 0.1, weight_decay: 0.0 }],
        schedule: LrSchedule::constant(0),
    };
    let specs = (0..UNITS).map(spec).collect();
    let mut initial = |_, weights: &mut [f32]| weights.fill(1.0);
    Engine::new(specs, chain().order(), options, optimizer, comm, &mut initial).unwrap()
}

fn chain() -> Chain<Echo> {
    let order = (0..UNITS).chain([0]);
    Chain::new(order.map(|unit| Link { unit: UnitId(unit), segment: Echo }).collect())
}

/// Runs a world; returns the bytes of regions a rank at rest, and their peak over one step.
fn measure(stage: Stage, model: DType, accumulation: usize, world_size: usize) -> (usize, usize) {
    let start = Barrier::new(world_size);
    let rest = AtomicUsize::new(0);
    let before = REGIONS.load(SeqCst);
    thread::scope(|scope| {
        for comm in threads::group(WorldSize::new(world_size).unwrap()) {
            let (start, rest) = (&start, &rest);
            scope.spawn(move || {
                let mut engine = engine(stage, model, accumulation, comm);
                let chain = chain();
                for step in 0..2 {
                    start.wait();
                    if step == 1 {
                        REGIONS_PEAK.store(REGIONS.load(SeqCst), SeqCst);
                    }
                    start.wait();
                    for _ in 0..accumulation {
                        chain.train(&mut engine, &(), Recompute::Always, 0).unwrap();
                        let outcome = engine.step().unwrap();
                        assert!(!matches!(outcome, StepOutcome::Skipped { .. }));
                    }
                    engine.communicator().barrier().unwrap();
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
    // By hand, for 4 parameters of 4096 elements on two ranks with AdamW: bf16 weights of two
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

/// Alone, a rank peaks where the plan says, but for the copy that the thread back end offers to
/// the other ranks: at most one bucket.
fn peaks() {
    for stage in Stage::ALL {
        for accumulation in [1, 2] {
            let (_, peak) = measure(stage, DType::Bf16, accumulation, 1);
            let group = threads::group(WorldSize::ONE).pop().unwrap();
            let plan = engine(stage, DType::Bf16, accumulation, group).plan();
            let (least, most) = (plan.rest.total(), plan.peak_total + Bytes(4 * NUMEL));
            assert!(Bytes(peak) >= least && Bytes(peak) <= most, "{stage:?}: {peak}, {plan:?}");
        }
    }
}
