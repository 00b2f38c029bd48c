//! What is tried: for every stage and precision, a grid over a small odd model, and drawn trials.

use std::fmt;

use oxizero::{EngineOptions, Reduction};
use oxizero_core::{Bucketing, Bytes, DType, Precision, Stage};
use oxizero_sim::drawn::{self, Chosen};
use oxizero_sim::odd::{ADAM, ADAMW, SGD, model_of};
use oxizero_sim::trial::{Reads, Trial};

use super::Width;

/// The trials of one stage and precision.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) stage: Stage,
    pub(super) precision: Precision,
    pub(super) trials: Vec<Named>,
}

/// A trial, and what tells it from the others of its row.
pub(super) struct Named {
    pub(super) name: String,
    pub(super) trial: Trial,
}

/// The rows of the table, in order.
pub(super) fn rows(width: Width, ranks: &[usize], seed: u64) -> impl Iterator<Item = Row> {
    let stages = Stage::ALL.into_iter();
    let pairs = stages.flat_map(|stage| PRECISIONS.map(|dtypes| (stage, dtypes)));
    let ranks = ranks.to_vec();
    pairs.map(move |(stage, dtypes)| {
        let precision = precision(dtypes);
        Row { stage, precision, trials: trials(width, &ranks, seed, (stage, precision)) }
    })
}

/// Of weights, of what travels, and of sums.
const PRECISIONS: [[DType; 3]; 8] = [
    [DType::Bf16, DType::Bf16, DType::F32],
    [DType::Bf16, DType::F32, DType::F32],
    [DType::Bf16, DType::F16, DType::F32],
    [DType::Bf16, DType::Bf16, DType::Bf16],
    [DType::F16, DType::F16, DType::F32],
    [DType::F16, DType::F16, DType::F16],
    [DType::F32, DType::Bf16, DType::F32],
    [DType::F32, DType::F32, DType::F32],
];

pub(super) fn precision([model, reduce, accumulate]: [DType; 3]) -> Precision {
    Precision { reduce, accumulate, ..Precision::of_model(model) }
}

/// Drawn trials follow those of the grid's same world size, so that a row that is cut short still
/// has some of both.
fn trials(
    width: Width,
    ranks: &[usize],
    seed: u64,
    (stage, precision): (Stage, Precision),
) -> Vec<Named> {
    let drawn_count = match width {
        Width::Quick => 8,
        Width::Full => 200,
    };
    let mut all = Vec::new();
    for ranks in ranks {
        for (turn, options) in grid(width, stage, precision).into_iter().enumerate() {
            let rule = [ADAMW, ADAM, SGD][turn % 3];
            let reads = [Reads::All, Reads::None][turn / 2 % 2];
            let trial = Trial { ranks: *ranks, rule, reads, seed, ..model_of(options) };
            all.push(Named::new(trial));
        }
        for turn in 0..drawn_count {
            let chosen = Chosen { stage, precision, ranks: *ranks };
            all.push(Named::new(drawn::of(seed + turn, chosen)));
        }
    }
    all
}

/// Every way to ask for the small model.
fn grid(width: Width, stage: Stage, precision: Precision) -> Vec<EngineOptions> {
    let by = |bytes| Bucketing::Bytes(Bytes(bytes));
    let (accumulations, bucketings): (&[usize], &[Bucketing]) = match width {
        Width::Quick => (&[1, 3], &[Bucketing::Unit, by(40), by(1 << 20)]),
        Width::Full => (&[1, 2, 3, 5], &[Bucketing::Unit, by(1), by(40), by(200), by(1 << 20)]),
    };
    let choices: &[_] = match width {
        Width::Quick => &[(Reduction::Mean, Some(2.5))],
        Width::Full => &[
            (Reduction::Mean, Some(2.5)),
            (Reduction::Mean, None),
            (Reduction::Sum, Some(2.5)),
            (Reduction::Weighted, Some(2.5)),
        ],
    };
    let mut all = Vec::new();
    for accumulation in accumulations {
        for bucketing in bucketings {
            for (reduction, clip_norm) in choices {
                all.push(EngineOptions {
                    accumulation: *accumulation,
                    bucketing: *bucketing,
                    reduction: *reduction,
                    clip_norm: *clip_norm,
                    align: Bytes([64, 1][all.len() % 2]),
                    ..EngineOptions::new(stage, precision)
                });
            }
        }
    }
    all
}

impl Named {
    pub(super) fn new(trial: Trial) -> Self {
        let EngineOptions { accumulation, bucketing, reduction, clip_norm, align, .. } =
            &trial.options;
        let clip = clip_norm.map_or("unclipped".into(), |norm| format!("clipped at {norm}"));
        let name = format!(
            "{} ranks, windows of {accumulation}, {bucketing:?}, {reduction:?}, {clip}, align {}, \
             {} parameters, {:?}, reads {:?}, seed {}",
            trial.ranks,
            align.0,
            trial.specs.len(),
            trial.rule,
            trial.reads,
            trial.seed
        );
        Self { name, trial }
    }
}

impl fmt::Debug for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Precision { model, reduce, accumulate, .. } = self.precision;
        let stage = u8::from(self.stage);
        write!(f, "stage {stage}, {model} weights, {reduce} wire, {accumulate} sums")
    }
}
