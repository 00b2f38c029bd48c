//! Faults that people met in engines like this one: an input, and the right value.
//!
//! Every case runs in every stage it makes sense in, with buckets of one parameter, of a unit and
//! of the whole model, and on all ranks. The models are SGD with a learning rate of 1 where nothing
//! else is said, so that a weight shows its gradient.
#![expect(clippy::excessive_precision, reason = "exact values are written in full")]

mod access;
mod averaging;
mod group_access;
mod groups;
mod loss_scales;
mod misuse;
mod norms;
mod odd_parameters;
mod precision;

use oxizero::{
    Engine, EngineError, EngineOptions, GradIn, GroupOptions, Norm, Reduction, Scope, SkipReason,
};
use oxizero::{GradView, StepOutcome};
use oxizero_core::{Bucketing, Bytes, DType, LossScale, ParamId, ParamSpec, Precision, Rank};
use oxizero_core::{Stage, UnitId};
use oxizero_sim::oracle::Rule;
use oxizero_sim::trial::{At, Backward, Trained, Trial, to_f32};
use oxizero_sim::watched::{Kind, Plan};
use oxizero_sim::world;

const BF16: DType = DType::Bf16;
const F16: DType = DType::F16;
const F32: DType = DType::F32;

/// Elements lie side by side, so that ranks share even the smallest parameter.
fn options(precision: Precision) -> EngineOptions {
    EngineOptions { align: Bytes(1), ..EngineOptions::new(Stage::Zero0, precision) }
}

fn one_weight(precision: Precision, backward: Backward) -> Trial {
    Trial::new(options(precision), &[("w", &[0.0])], backward)
}

fn two_units(model: DType, backward: Backward) -> Trial {
    let params: [(&str, &[f32]); 2] = [("p0", &[0.0]), ("p1", &[0.0])];
    Trial::new(options(Precision::of_model(model)), &params, backward)
}

fn summed(trial: &Trial, accumulation: usize) -> Trial {
    let options =
        EngineOptions { accumulation, reduction: Reduction::Sum, ..trial.options.clone() };
    Trial { options, ..trial.clone() }
}

fn in_stage(trial: &Trial, stage: Stage) -> Trial {
    Trial { options: EngineOptions { stage, ..trial.options.clone() }, ..trial.clone() }
}

/// Calls `check` with the trial in every stage and bucketing.
fn each_stage(trial: &Trial, check: impl Fn(&Trial)) {
    let bucketings =
        [Bucketing::Bytes(Bytes(1)), Bucketing::Unit, Bucketing::Bytes(Bytes(1 << 20))];
    for stage in Stage::ALL {
        for bucketing in bucketings {
            let mut trial = in_stage(trial, stage);
            trial.options.bucketing = bucketing;
            println!("{stage:?}, {bucketing:?}, {} ranks", trial.ranks);
            check(&trial);
        }
    }
}

/// Calls `check` with what every rank has after the trial, in every stage and bucketing.
fn everywhere(trial: &Trial, check: impl Fn(&Trained)) {
    each_stage(trial, |trial| trial.run().iter().for_each(&check));
}

fn full_grad(engine: &mut Engine, param: usize) -> Vec<f32> {
    let grad = engine.full_grad(ParamId(param)).expect("the window is complete");
    to_f32(grad.expect("the parameter is trained").view())
}

/// The only pass of a micro-batch of the first window on the first rank.
fn at(micro: usize) -> At {
    At { step: 0, micro, pass: 0, rank: 0, param: 0, seed: 0 }
}
