//! What ranks are started with, fact by fact: all ranks with the same.

use std::fmt;

use oxizero_comm::{CommError, Communicator};
use oxizero_core::{
    Along, Batches, Bucketing, LossScaling, Mesh, MeshAxis, ParamSpec, Rank, UnitId,
};

use crate::options::{EngineOptions, GroupOptions, OptimizerSetup, Reduction};
use crate::setup::fingerprint;
use crate::{EngineError, Norm};

/// Bytes of a fact that ranks tell each other.
const FACT_BYTES: usize = 256;

/// What a fact is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// An option: its path in [`EngineOptions`] or [`OptimizerSetup`], such as `precision.reduce`,
    /// or `order`.
    Option(&'static str),
    /// Which parameter there is at a place, counted from 0.
    Place(usize),
    /// What a parameter is.
    Param {
        /// Its name.
        name: String,
        /// Which side of it, such as `dtype`.
        what: &'static str,
    },
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option(path) => write!(f, "`{path}`"),
            Self::Place(index) => write!(f, "parameter {index}"),
            Self::Param { name, what } => write!(f, "the {what} of parameter `{name}`"),
        }
    }
}

/// Facts, each with what it is on this rank.
type Facts = Vec<(Fact, String)>;

/// Compares what the ranks were started with; a collective call.
pub(crate) fn agree(
    specs: &[ParamSpec],
    order: &[UnitId],
    options: &EngineOptions,
    optimizer: &OptimizerSetup,
    comm: &dyn Communicator,
) -> Result<(), EngineError> {
    let facts = |count: usize| {
        let mut facts = of_options(options);
        facts.extend(of_optimizer(optimizer));
        facts.extend(specs.iter().take(count).enumerate().flat_map(of_param));
        let next = specs.get(count).map_or("absent".into(), |spec| format!("`{}`", spec.name));
        facts.push((Fact::Place(count), next));
        facts.extend(of_model(options, order));
        facts
    };
    let own = [fingerprint(&words(&facts(specs.len()))), specs.len() as u64];
    let told = exchange(comm, &own)?;
    if told.iter().all(|other| *other == told[0]) {
        return Ok(());
    }
    let common = told.iter().map(|other| other[1] as usize).min().unwrap_or(0);
    let facts = facts(common);
    let hashes: Vec<u64> = facts.iter().map(|(_, value)| fingerprint(value)).collect();
    let hashes = exchange(comm, &hashes)?;
    let differs = |at: usize| hashes.iter().position(|other| other[at] != hashes[0][at]);
    let first = (0..facts.len()).find_map(|at| Some((at, differs(at)?)));
    let (at, rank) = first.expect("the same facts would have had the same fingerprint");
    let values = exchange_values(comm, &facts[at].1)?;
    let [expected, got] = [0, rank].map(|rank| values[rank].clone());
    Err(EngineError::SetupDiffers { rank: Rank(rank), fact: facts[at].0.clone(), expected, got })
}

/// All that they say.
fn words(facts: &Facts) -> String {
    facts.iter().map(|(fact, value)| format!("{fact} {value}\n")).collect()
}

/// What does not follow from the model.
fn of_options(options: &EngineOptions) -> Facts {
    let EngineOptions {
        stage,
        mesh,
        bucketing: _, // these two come after the model
        precision: _,
        accumulation,
        reduction,
        norm,
        clip_norm,
        loss_scaling,
        check_finite,
        align,
    } = options;
    let reduction = match reduction {
        Reduction::Mean => "mean",
        Reduction::Sum => "sum",
        Reduction::Weighted => "weighted",
    };
    let norm = match norm {
        Norm::One => "1",
        Norm::Two => "2",
        Norm::Three => "3",
        Norm::Infinity => "inf",
    };
    let facts = [
        ("stage", u8::from(*stage).to_string()),
        ("mesh", of_mesh(mesh.as_ref())),
        ("accumulation", accumulation.to_string()),
        ("reduction", reduction.into()),
        ("norm", norm.into()),
        ("clip_norm", clip_norm.map_or("none".into(), |norm| norm.to_string())),
        ("loss_scaling", of_scaling(*loss_scaling)),
        ("check_finite", check_finite.to_string()),
        ("align", align.0.to_string()),
    ];
    facts.into_iter().map(|(path, value)| (Fact::Option(path), value)).collect()
}

fn of_mesh(mesh: Option<&Mesh>) -> String {
    let axis = |MeshAxis { name, size, batches }: &MeshAxis| match batches {
        Batches::Different => format!("{name} {size}"),
        Batches::Same => format!("{name} {size} (on the same batches)"),
    };
    let axes = mesh.map(|mesh| mesh.axes().iter().map(axis).collect::<Vec<_>>().join(" x "));
    axes.unwrap_or_else(|| "none".into())
}

fn of_scaling(scaling: LossScaling) -> String {
    match scaling {
        LossScaling::Fixed(scale) => format!("fixed at {}", scale.get()),
        LossScaling::Dynamic(dynamic) => format!(
            "dynamic from {} down to {}, window {}, hysteresis {}{}",
            dynamic.initial,
            dynamic.minimum,
            dynamic.loss_scale_window,
            dynamic.hysteresis,
            if dynamic.consecutive_hysteresis { " (consecutive)" } else { "" },
        ),
    }
}

fn of_optimizer(optimizer: &OptimizerSetup) -> Facts {
    let OptimizerSetup { rule, groups, schedule } = optimizer;
    let group = |group: &GroupOptions| {
        let GroupOptions { lr, weight_decay } = group;
        format!("lr {lr:?} and weight decay {weight_decay:?}")
    };
    let groups = groups.iter().map(group).collect::<Vec<_>>().join("; ");
    let facts =
        [("rule", rule.description()), ("groups", groups), ("schedule", schedule.to_string())];
    facts.into_iter().map(|(path, value)| (Fact::Option(path), value)).collect()
}

fn of_param((index, spec): (usize, &ParamSpec)) -> Facts {
    let ParamSpec { name, aliases, shape, dtype, unit, group, trainable, contributions, along } =
        spec;
    let frozen = if *trainable { "" } else { " (frozen)" };
    let facts = [
        ("dtype", dtype.to_string()),
        ("shape", listed(shape, usize::to_string)),
        ("other names", listed(aliases, |name| format!("`{name}`"))),
        ("unit", unit.to_string()),
        ("optimizer group", format!("{}{frozen}", group.0)),
        ("number of gradients a micro-batch", contributions.to_string()),
        ("place on the mesh", listed(along, of_along)),
    ];
    let of = |(what, value)| (Fact::Param { name: name.clone(), what }, value);
    let place = (Fact::Place(index), format!("`{name}`"));
    [place].into_iter().chain(facts.map(of)).collect()
}

fn of_along(along: &Along) -> String {
    match along {
        Along::Reduced => "reduced".into(),
        Along::Replicated => "replicated".into(),
        Along::Split { dim } => format!("split along dimension {dim}"),
        Along::Distinct => "distinct".into(),
    }
}

/// What a front-end may take from the model: the model's own differences are told before.
fn of_model(options: &EngineOptions, order: &[UnitId]) -> Facts {
    let precision = options.precision;
    let bucketing = match options.bucketing {
        Bucketing::Unit => "a bucket a unit".into(),
        Bucketing::Bytes(bytes) => format!("{} bytes", bytes.0),
    };
    let facts = [
        ("precision.model", precision.model.to_string()),
        ("precision.reduce", precision.reduce.to_string()),
        ("precision.accumulate", precision.accumulate.to_string()),
        ("precision.master", precision.master.to_string()),
        ("bucketing", bucketing),
        ("order", listed(order, UnitId::to_string)),
    ];
    facts.into_iter().map(|(path, value)| (Fact::Option(path), value)).collect()
}

fn listed<T>(all: &[T], text: impl Fn(&T) -> String) -> String {
    format!("[{}]", all.iter().map(text).collect::<Vec<_>>().join(", "))
}

fn exchange(comm: &dyn Communicator, words: &[u64]) -> Result<Vec<Vec<u64>>, CommError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let told = comm.exchange("Engine::new", &bytes)?;
    let words = |bytes: Vec<u8>| {
        let (words, _) = bytes.as_chunks();
        words.iter().map(|word| u64::from_le_bytes(*word)).collect()
    };
    Ok(told.into_iter().map(words).collect())
}

/// The beginning of what a fact is on every rank.
fn exchange_values(comm: &dyn Communicator, value: &str) -> Result<Vec<String>, CommError> {
    let value = &value[..value.floor_char_boundary(FACT_BYTES)];
    let mut bytes = [0; FACT_BYTES];
    bytes[..value.len()].copy_from_slice(value.as_bytes());
    let text = |bytes: Vec<u8>| {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    };
    Ok(comm.exchange("Engine::new", &bytes)?.into_iter().map(text).collect())
}
