//! A small model, and an allocator that counts what its training holds.
//!
//! Regions are the only allocations on a multiple of 64 bytes, so that they are told from the
//! test's own.
#![expect(unsafe_code, reason = "a global allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use oxizero::chain::{Chain, Link};
use oxizero::segment::{GradSink, Input, OutputGrad, Segment};
use oxizero::{
    Backend, Engine, EngineError, EngineOptions, GradView, GroupOptions, OptimizerSetup,
};
use oxizero_comm::Communicator;
use oxizero_core::{DType, ParamSpec, Precision, Stage, UnitId};
use oxizero_device::{ViewMut, kernels};
use oxizero_optim::{AdamW, LrSchedule, MomentOptions};

/// Elements of each parameter.
pub(crate) const NUMEL: usize = 1 << 16;
/// Units of one parameter each.
pub(crate) const UNITS: usize = 4;

struct Counting;

/// Live bytes of regions.
pub(crate) static REGIONS: AtomicUsize = AtomicUsize::new(0);
/// The most of them.
pub(crate) static REGIONS_PEAK: AtomicUsize = AtomicUsize::new(0);
/// Live bytes of everything else.
pub(crate) static OTHERS: AtomicUsize = AtomicUsize::new(0);
/// Allocations so far, of both.
pub(crate) static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

fn counter(layout: &Layout) -> &'static AtomicUsize {
    if layout.align() == 64 { &REGIONS } else { &OTHERS }
}

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, SeqCst);
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

/// A segment whose parameter's gradient is its weights; f32 as most frameworks give it.
pub(crate) struct Echo;

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
        _: OutputGrad<()>,
        sink: &mut dyn GradSink,
    ) -> Result<Option<()>, EngineError> {
        sink.grad(0, GradView::F32(&vec![1.0; NUMEL]))?;
        Ok(Some(()))
    }
}

/// Units of one parameter each; a tied head reads the first unit again.
pub(crate) fn engine(
    stage: Stage,
    model: DType,
    accumulation: usize,
    comm: Box<dyn Communicator>,
) -> Engine {
    engine_on(stage, model, accumulation, Backend::host(comm))
}

/// The same on any back end of the host.
pub(crate) fn engine_on(
    stage: Stage,
    model: DType,
    accumulation: usize,
    backend: Backend,
) -> Engine {
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
    let mut initial = |_, weights: ViewMut<'_>| kernels::fill(weights, 1.0);
    Engine::on_backend(specs, chain().order(), options, optimizer, backend, &mut initial).unwrap()
}

/// The model's segments.
pub(crate) fn chain() -> Chain<Echo> {
    let order = (0..UNITS).chain([0]);
    Chain::new(order.map(|unit| Link { unit: UnitId(unit), segment: Echo }).collect())
}
