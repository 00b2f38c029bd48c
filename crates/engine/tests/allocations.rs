//! A step allocates as often for many parameters as for few, but for lists that grow with them.
//!
//! One test alone, for it reads a counter of the whole process.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

#[allow(dead_code, reason = "only the allocator is used")]
mod common;

use std::sync::atomic::Ordering::SeqCst;

use common::ALLOCATIONS;
use oxizero::{Engine, EngineOptions, GradIn, GradView, GroupOptions, OptimizerSetup, StepOutcome};
use oxizero_comm::threads;
use oxizero_core::{DType, LossScale, ParamId, ParamSpec, Precision, Stage, UnitId, WorldSize};
use oxizero_optim::{AdamW, LrSchedule, MomentOptions};

/// Less than an alignment, so that padding lies between parameters.
const NUMEL: usize = 5;
const UNIT: UnitId = UnitId(0);

fn engine(stage: Stage, params: usize) -> Engine {
    let optimizer = OptimizerSetup {
        rule: Box::new(AdamW::new(MomentOptions::default()).unwrap()),
        groups: vec![GroupOptions { lr: 0.1, weight_decay: 0.1 }],
        schedule: LrSchedule::constant(0),
    };
    let spec = |index: usize| ParamSpec::new(index.to_string(), &[NUMEL], DType::Bf16, UNIT);
    let specs = (0..params).map(spec).collect();
    let options = EngineOptions::new(stage, Precision::of_model(DType::Bf16));
    let comm = threads::group(WorldSize::ONE).remove(0);
    let mut initial = |_, weights: &mut [f32]| weights.fill(1.0);
    Engine::new(specs, vec![UNIT], options, optimizer, comm, &mut initial).unwrap()
}

/// Allocations of a window of one micro-batch, after others.
fn allocations(stage: Stage, params: usize) -> usize {
    let mut engine = engine(stage, params);
    let mut before = 0;
    for _ in 0..3 {
        before = ALLOCATIONS.load(SeqCst);
        engine.pre_forward(UNIT).unwrap();
        engine.post_forward(UNIT).unwrap();
        engine.pre_backward(UNIT).unwrap();
        for param in (0..params).map(ParamId) {
            let values = GradView::F32(&[0.5; NUMEL]);
            engine.grad_ready(param, GradIn { values, loss_scale: LossScale::ONE }).unwrap();
        }
        engine.post_backward(UNIT).unwrap();
        engine.backward_end().unwrap();
        assert!(matches!(engine.step().unwrap(), StepOutcome::Applied { .. }));
    }
    ALLOCATIONS.load(SeqCst) - before
}

#[test]
fn nothing_is_allocated_for_each_parameter() {
    // A list doubles six times from 16 to 1,024 elements.
    const LISTS: usize = 8;
    for stage in [Stage::Zero0, Stage::Zero1, Stage::Zero2, Stage::Zero3] {
        let [few, many] = [16, 1024].map(|params| allocations(stage, params));
        assert!(many <= few + 6 * LISTS, "{stage:?}: {many} allocations, and {few} of few");
    }
}
