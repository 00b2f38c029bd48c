//! Trials that nobody thought of: what is not asked for is drawn from a seed.

use oxizero::{EngineOptions, GroupOptions, Norm, Reduction};
use oxizero_core::{
    Along, Batches, Bucketing, Bytes, DType, DynamicLossScale, LossScale, LossScaling, Mesh,
    MeshAxis, OptimGroup, ParamSpec, Precision, Random, Stage, UnitId, WorldSize,
};

use crate::odd::{ADAM, ADAMW, SGD};
use crate::oracle::{MicroBatch, Pass};
use crate::trial::{At, Ends, Reads, Trial};

/// What a trial is drawn for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The stage.
    pub stage: Stage,
    /// The dtypes; of masters f32.
    pub precision: Precision,
    /// Ranks.
    pub ranks: usize,
    /// How they are arranged, if not for data parallelism alone.
    pub mesh: Option<Mesh>,
}

/// A trial of which everything is drawn.
pub fn any(seed: u64) -> Trial {
    let mut draw = Draw::new(seed, &[CHOICE]);
    let model = draw.of(&DType::ALL);
    let reduce = draw.of(&[model, model, DType::F32, DType::Bf16, DType::F16]);
    let accumulate = draw.of(&[DType::F32, reduce]);
    let precision = Precision { reduce, accumulate, ..Precision::of_model(model) };
    let ranks = draw.of(&[1, 2, 3, 4, 4, 6]);
    let mesh = if draw.one_in(3) { None } else { Some(draw_mesh(&mut draw, ranks)) };
    of(seed, Chosen { stage: draw.of(&Stage::ALL), precision, ranks, mesh })
}

/// A trial of which everything else is drawn.
pub fn of(seed: u64, chosen: Chosen) -> Trial {
    let mut draw = Draw::new(seed, &[MODEL]);
    let ranks = chosen.ranks;
    let options = draw_options(&mut draw, chosen);
    let specs = draw_specs(&mut draw, seed, &options);
    let mut initial =
        |spec: &ParamSpec| (0..spec.numel().0 * ranks).map(|_| draw.0.normal()).collect();
    Trial {
        initial: specs.iter().map(&mut initial).collect(),
        specs,
        options,
        rule: draw.of(&[ADAMW, ADAM, SGD]),
        groups: vec![
            GroupOptions { lr: 0.0314, weight_decay: 0.1 },
            GroupOptions { lr: 0.1, weight_decay: 0.0 },
        ],
        ranks,
        steps: 3,
        warmup_steps: draw.up_to(0, 4) as u64,
        windows: draw_window,
        ends: draw.of(&[Ends::Counted, Ends::Called]),
        backward: draw_grads,
        seed,
        reads: draw.of(&[Reads::All, Reads::None, Reads::SetBack]),
    }
}

/// What a path of draws is for.
const CHOICE: u64 = 4;
const MODEL: u64 = 0;
const WINDOWS: u64 = 1;
const GRADS: u64 = 2;
const USES: u64 = 3;

/// So many ranks along up to three axes, of which some may be of one rank.
fn draw_mesh(draw: &mut Draw, ranks: usize) -> Mesh {
    let mut sizes = Vec::new();
    let mut rest = ranks;
    for _ in 0..draw.up_to(0, 2) {
        let divisors: Vec<_> = (1..=rest).filter(|size| rest.is_multiple_of(*size)).collect();
        sizes.push(draw.of(&divisors));
        rest /= sizes[sizes.len() - 1];
    }
    sizes.push(rest);
    let mut axis = |(index, size): (usize, usize)| MeshAxis {
        name: format!("axis {index}"),
        size: WorldSize::new(size).expect("a divisor of a number above zero"),
        batches: draw.of(&[Batches::Different, Batches::Same]),
    };
    let axes = sizes.into_iter().enumerate().map(&mut axis).collect();
    Mesh::new(axes).expect("names that differ")
}

/// What ranks that work on different micro-batches hold has no gradient that is the same on all.
fn draw_along(draw: &mut Draw, mesh: &Mesh, dimensions: usize) -> Vec<Along> {
    if draw.one_in(3) {
        return Vec::new();
    }
    let mut on = |axis: &MeshAxis| {
        let first = match axis.batches {
            Batches::Different => Along::Reduced,
            Batches::Same => Along::Replicated,
        };
        let split = match dimensions {
            0 => Along::Distinct,
            _ => Along::Split { dim: draw.up_to(0, dimensions - 1) },
        };
        draw.of(&[first, Along::Reduced, split, Along::Distinct])
    };
    mesh.axes().iter().map(&mut on).collect()
}

fn draw_options(draw: &mut Draw, chosen: Chosen) -> EngineOptions {
    let initial = 65536.0;
    let dynamic = DynamicLossScale {
        initial,
        loss_scale_window: draw.up_to(1, 3) as u64,
        hysteresis: draw.up_to(1, 2) as u64,
        consecutive_hysteresis: draw.one_in(2),
        minimum: initial / 1e6,
    };
    let fixed = |scale| LossScaling::Fixed(LossScale::new(scale).expect("a scale"));
    let scalings = [fixed(1.0), fixed(1.0), fixed(1024.0), LossScaling::Dynamic(dynamic)];
    let loss_scaling = draw.of(&scalings);
    let checks = matches!(loss_scaling, LossScaling::Dynamic(_)) || !draw.one_in(4);
    let bytes = Bucketing::Bytes(Bytes(draw.up_to(0, 400)));
    EngineOptions {
        stage: chosen.stage,
        mesh: chosen.mesh,
        bucketing: draw.of(&[Bucketing::Unit, bytes, Bucketing::Bytes(Bytes(1 << 20))]),
        precision: chosen.precision,
        accumulation: draw.up_to(1, 3),
        reduction: draw.of(&[Reduction::Mean, Reduction::Sum, Reduction::Weighted]),
        norm: draw.of(&[Norm::One, Norm::Two, Norm::Three, Norm::Infinity]),
        clip_norm: draw.of(&[None, Some(0.5), Some(5.0)]),
        loss_scaling,
        check_finite: checks,
        align: Bytes(draw.up_to(1, 64)),
    }
}

/// Up to eight parameters of at most three dimensions. Some are empty or frozen, maybe all.
fn draw_specs(draw: &mut Draw, seed: u64, options: &EngineOptions) -> Vec<ParamSpec> {
    let model = options.precision.model;
    let (mut specs, mut unit) = (Vec::new(), 0);
    for param in 0..draw.up_to(1, 8) {
        unit += draw.up_to(0, usize::from(param > 0));
        let dimensions = draw.up_to(0, 3);
        let sizes = (0..dimensions).map(|_| draw.up_to(0, [40, 9, 4][dimensions - 1]));
        let shape: Vec<_> = sizes.collect();
        let dtype = if draw.one_in(5) { draw.of(&DType::ALL) } else { model };
        let mesh = options.mesh.as_ref();
        specs.push(ParamSpec {
            along: mesh.map_or_else(Vec::new, |mesh| draw_along(draw, mesh, dimensions)),
            group: OptimGroup(draw.up_to(0, 1)),
            trainable: !draw.one_in(5),
            contributions: contributions(seed, param),
            ..ParamSpec::new(format!("p{param}"), &shape, dtype, UnitId(unit))
        });
    }
    specs
}

/// How many a parameter may have in a pass.
fn contributions(seed: u64, param: usize) -> usize {
    Draw::new(seed, &[USES, param as u64]).of(&[1, 1, 1, 2, 3])
}

/// Up to three micro-batches of up to three passes, the same on all ranks but for their weights.
/// Where nothing is communicated before the window's end, ranks may differ in all of it.
fn draw_window(trial: &Trial, step: usize, rank: usize) -> Vec<MicroBatch> {
    let mut weights = Draw::new(trial.seed, &[WINDOWS, step as u64, rank as u64]);
    let mut draw = Draw::new(trial.seed, &[WINDOWS, step as u64]);
    if draw.one_in(2) && trial.options.stage <= Stage::Zero1 {
        draw = weights.clone();
    }
    let count = draw.up_to(1, 3);
    let micro_batch = |micro| {
        // The weights of rank 0 make the window's more than nothing.
        let weight = weights.up_to(usize::from((rank, micro) == (0, 0)), 3) as f64;
        let passes =
            (0..draw.up_to(1, 3)).map(|_| draw.of(&[Pass::Reduced, Pass::Reduced, Pass::KeptBack]));
        MicroBatch { passes: passes.collect::<Vec<_>>(), weight }
    };
    (0..count).map(micro_batch).collect()
}

/// Any number of contributions up to what the parameter may have; a few are infinite.
fn draw_grads(at: At, weights: &[f32]) -> Vec<Vec<f32>> {
    let path = [at.step, at.micro, at.pass, at.rank, at.param].map(|part| part as u64);
    let mut draw = Draw::new(at.seed, &[&[GRADS], &path[..]].concat());
    let most = contributions(at.seed, at.param);
    let count = if draw.one_in(4) { draw.up_to(0, most) } else { most };
    let mut contribution = |_| {
        let size = if draw.one_in(400) { f32::INFINITY } else { 1.0 };
        weights.iter().map(|weight| (draw.0.normal() + 0.3 * weight) * size).collect()
    };
    (0..count).map(&mut contribution).collect()
}

#[derive(Clone)]
struct Draw(Random);

impl Draw {
    fn new(seed: u64, path: &[u64]) -> Self {
        Self(Random::for_path(seed, path))
    }

    fn up_to(&mut self, least: usize, most: usize) -> usize {
        least + (self.0.next_u64() % (most - least + 1) as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.up_to(1, count) == 1
    }

    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.up_to(0, choices.len() - 1)].clone()
    }
}
