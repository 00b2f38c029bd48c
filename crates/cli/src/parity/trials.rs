//! What is tried: for every stage and precision, and for every stage and arrangement of ranks in
//! process groups, a grid over a small odd model, and drawn trials.

use std::fmt;

use oxizero::{EngineOptions, Reduction};
use oxizero_core::{Bucketing, Bytes, DType, Mesh, Precision, Stage, counted};
use oxizero_sim::drawn::{self, Chosen};
use oxizero_sim::layouts::{self, meshes};
use oxizero_sim::odd::{self, ADAM, ADAMW, SGD};
use oxizero_sim::trial::{Reads, Trial};

use super::Width;

/// The trials of one stage, and of one arrangement of ranks or of one precision.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) stage: Stage,
    /// The arrangement; `None` for data parallelism alone.
    pub(super) mesh: Option<Mesh>,
    /// The dtypes; `None` for all of them in turn.
    pub(super) precision: Option<Precision>,
    pub(super) trials: Vec<Named>,
}

/// A trial, and what tells it from the others of its row.
pub(super) struct Named {
    pub(super) name: String,
    pub(super) trial: Trial,
}

/// The worlds that are tried.
#[derive(Debug)]
pub(super) struct Worlds {
    /// Ranks of data parallelism alone.
    pub(super) data: Vec<usize>,
    /// Ranks in groups.
    groups: Vec<Mesh>,
}

impl Worlds {
    /// Those of so many ranks; a choice if nobody says how many.
    pub(super) fn of(ranks: Option<&[usize]>) -> Self {
        let mut groups = meshes();
        if let Some(ranks) = ranks {
            groups.retain(|mesh| ranks.contains(&mesh.world_size().get()));
        }
        Self { data: ranks.unwrap_or(&[1, 2, 3, 4]).to_vec(), groups }
    }
}

/// The rows of the table, in order.
pub(super) fn rows(width: Width, worlds: &Worlds, seed: u64) -> impl Iterator<Item = Row> {
    let data = Stage::ALL.into_iter().flat_map(move |stage| {
        PRECISIONS.map(|dtypes| {
            let precision = precision(dtypes);
            let trials = trials(width, &worlds.data, seed, (stage, precision));
            Row { stage, mesh: None, precision: Some(precision), trials }
        })
    });
    let groups = Stage::ALL.into_iter().flat_map(move |stage| {
        worlds.groups.iter().map(move |mesh| {
            let trials = group_trials(width, mesh, seed, stage);
            Row { stage, mesh: Some(mesh.clone()), precision: None, trials }
        })
    });
    data.chain(groups)
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
            let trial = Trial { ranks: *ranks, rule, reads, seed, ..odd::model_of(options) };
            all.push(Named::new(trial));
        }
        for turn in 0..drawn_count {
            let chosen = Chosen { stage, precision, ranks: *ranks, mesh: None };
            all.push(Named::new(drawn::of(seed + turn, chosen)));
        }
    }
    all
}

/// The precisions in turn, each with another part of the grid.
fn group_trials(width: Width, mesh: &Mesh, seed: u64, stage: Stage) -> Vec<Named> {
    let (drawn_count, grid_count) = match width {
        Width::Quick => (1, 2),
        Width::Full => (20, 30),
    };
    let mut all = Vec::new();
    for (first, dtypes) in PRECISIONS.into_iter().enumerate() {
        let precision = precision(dtypes);
        let mut options = grid(width, stage, precision);
        let count = options.len();
        options.rotate_left(13 * first % count);
        for (turn, options) in options.into_iter().enumerate().take(grid_count) {
            let rule = [ADAMW, ADAM, SGD][(first + turn) % 3];
            let reads = [Reads::All, Reads::None, Reads::SetBack][(first / 2 + turn) % 3];
            let trial = Trial { rule, reads, seed, ..layouts::model_of(options, mesh) };
            all.push(Named::new(trial));
        }
        for turn in 0..drawn_count {
            let (ranks, mesh) = (mesh.world_size().get(), Some(mesh.clone()));
            let chosen = Chosen { stage, precision, ranks, mesh };
            all.push(Named::new(drawn::of(seed + turn + 100 * first as u64, chosen)));
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
        let EngineOptions {
            precision, accumulation, bucketing, reduction, clip_norm, align, ..
        } = &trial.options;
        let Precision { model, reduce, accumulate, .. } = precision;
        let clip = clip_norm.map_or("unclipped".into(), |norm| format!("clipped at {norm}"));
        let name = format!(
            "{}, {model}, {reduce} and {accumulate}, windows of {accumulation}, \
             {bucketing:?}, {reduction:?}, {clip}, align {}, {}, {:?}, reads {:?}, \
             seed {}",
            counted(trial.ranks, "rank"),
            align.0,
            counted(trial.specs.len(), "parameter"),
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
        write!(f, "stage {}", u8::from(self.stage))?;
        if let Some(mesh) = &self.mesh {
            write!(f, ", {}", layouts::name(mesh))?;
        }
        match self.precision {
            Some(Precision { model, reduce, accumulate, .. }) => {
                write!(f, ", {model} weights, {reduce} wire, {accumulate} sums")
            }
            None => Ok(()),
        }
    }
}
