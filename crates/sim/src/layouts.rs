//! Arrangements of ranks in process groups, and a model with everything that is odd about
//! parameters there.

use std::fmt::Write;

use oxizero::EngineOptions;
use oxizero_core::{
    Along, Batches, DType, Mesh, MeshAxis, OptimGroup, ParamSpec, Random, UnitId, WorldSize,
};

use crate::odd;
use crate::trial::{At, Trial};

/// The arrangements of more than plain data parallelism, by world size. `tensor` is that of
/// tensor parallelism, in which some parameters are cut and others replicated; `sequence` that of
/// sequence parallelism, in which what is not cut is reduced over it.
pub fn meshes() -> Vec<Mesh> {
    let layouts: [&[(&str, usize)]; 10] = [
        &[("data", 1), ("tensor", 2)],
        &[("expert", 2)],
        &[("expert", 3)],
        &[("data", 2), ("tensor", 2)],
        &[("sequence", 2), ("data", 2)],
        &[("data", 2), ("expert", 2)],
        &[("expert", 2), ("tensor", 2)],
        &[("data", 3), ("tensor", 2)],
        &[("data", 2), ("expert", 3)],
        &[("data", 2), ("expert", 2), ("tensor", 2)],
    ];
    layouts.map(mesh).into()
}

/// A mesh of these axes and sizes.
pub fn mesh(axes: &[(&str, usize)]) -> Mesh {
    let axis = |(name, size): &(&str, usize)| MeshAxis {
        name: (*name).into(),
        size: WorldSize::new(*size).expect("a size above zero"),
        batches: match *name {
            "tensor" | "sequence" => Batches::Same,
            _ => Batches::Different,
        },
    };
    Mesh::new(axes.iter().map(axis).collect()).expect("names that differ")
}

/// The mesh in words, such as `2 data x 2 tensor`.
pub fn name(mesh: &Mesh) -> String {
    let mut words = String::new();
    for axis in mesh.axes() {
        let between = if words.is_empty() { "" } else { " x " };
        write!(words, "{between}{} {}", axis.size, axis.name).expect("a string takes everything");
    }
    words
}

/// What a parameter does along axes that a mesh has or has not: `expert`, and `tensor` or
/// `sequence`; `None` for what a parameter does that says nothing.
type Does = (Option<Along>, Option<Along>);

const SAYS_NOTHING: Does = (None, None);
const ROWS: Does = (None, Some(Along::Split { dim: 0 }));
const COLUMNS: Does = (None, Some(Along::Split { dim: 1 }));
const SUMMED: Does = (None, Some(Along::Reduced));
const EXPERT: Does = (Some(Along::Distinct), None);
const EXPERT_ROWS: Does = (Some(Along::Distinct), Some(Along::Split { dim: 0 }));
const EACH_ITS_OWN: Does = (Some(Along::Distinct), Some(Along::Distinct));
const TWICE_CUT: Does = (Some(Along::Split { dim: 1 }), Some(Along::Split { dim: 1 }));

const TIED: usize = 2;
const EXPERT_OF_SOME: usize = 10;
const EXPERT_OF_NONE: usize = 11;
const PART_OF_SOME: usize = 12;

/// A small model with everything that is odd about parameters of process groups.
pub fn model_of(options: EngineOptions, mesh: &Mesh) -> Trial {
    let (model, ranks) = (options.precision.model, mesh.world_size().get());
    let spec = |unit: usize, name: &str, shape: &[usize], does: Does| ParamSpec {
        along: along(mesh, does),
        ..ParamSpec::new(name, shape, model, UnitId(unit))
    };
    let other = if model == DType::F32 { DType::Bf16 } else { DType::F32 };
    let specs = vec![
        spec(0, "empty columns", &[0, 3], COLUMNS),
        spec(0, "rows", &[2, 3], ROWS),
        ParamSpec { contributions: 2, ..spec(0, "tied columns", &[5, 2], COLUMNS) },
        spec(0, "everywhere", &[7], SAYS_NOTHING),
        ParamSpec { group: OptimGroup(1), ..spec(1, "summed", &[5], SUMMED) },
        ParamSpec { trainable: false, ..spec(1, "frozen rows", &[3, 1], ROWS) },
        ParamSpec { dtype: other, ..spec(1, "rows of another dtype", &[3, 3], ROWS) },
        spec(2, "expert", &[3, 5], EXPERT),
        spec(2, "expert scalar", &[], EXPERT),
        ParamSpec { dtype: other, ..spec(2, "expert rows", &[3, 2], EXPERT_ROWS) },
        spec(3, "expert of some ranks", &[4], EXPERT),
        spec(3, "expert of none", &[2], EXPERT),
        ParamSpec { group: OptimGroup(1), ..spec(3, "rows of some ranks", &[1, 4], ROWS) },
        ParamSpec { trainable: false, ..spec(3, "frozen expert", &[3], EXPERT) },
        spec(4, "each its own", &[3], EACH_ITS_OWN),
        spec(4, "twice cut", &[2, 2, 3], TWICE_CUT),
        spec(4, "empty expert", &[0], EXPERT),
    ];
    let initial = |(index, spec): (usize, &ParamSpec)| {
        let mut random = Random::for_path(3, &[index as u64]);
        (0..spec.numel().0 * ranks).map(|_| random.normal()).collect()
    };
    let initial = specs.iter().enumerate().map(initial).collect();
    let options = EngineOptions { mesh: Some(mesh.clone()), ..options };
    Trial { initial, specs, ranks, backward, ..odd::model_of(options) }
}

fn along(mesh: &Mesh, (on_expert, on_tensor): Does) -> Vec<Along> {
    if (on_expert, on_tensor) == SAYS_NOTHING && mesh.axes().iter().all(|a| a.name != "sequence") {
        return Vec::new();
    }
    let on = |axis: &MeshAxis| match axis.name.as_str() {
        "expert" => on_expert.unwrap_or(Along::Reduced),
        "tensor" => on_tensor.unwrap_or(Along::Replicated),
        "sequence" => on_tensor.unwrap_or(Along::Reduced),
        _ => Along::Reduced,
    };
    mesh.axes().iter().map(on).collect()
}

/// Depends on the weights, so that a stale one shows, and is exact in no dtype.
fn backward(at: At, weights: &[f32]) -> Vec<Vec<f32>> {
    let contributions = match at.param {
        TIED => 2 - at.micro % 2,
        EXPERT_OF_NONE => 0,
        EXPERT_OF_SOME => usize::from((at.step + at.rank).is_multiple_of(3)),
        PART_OF_SOME => usize::from((at.step + at.micro + at.rank).is_multiple_of(3)),
        _ => 1,
    };
    let contribution = |turn: usize| {
        let path = [at.step, at.micro, at.pass, at.rank, at.param, turn].map(|part| part as u64);
        let mut random = Random::for_path(4 + at.seed, &path);
        weights.iter().map(|weight| random.normal() + 0.3 * weight).collect()
    };
    (0..contributions).map(contribution).collect()
}
