//! What ranks are started with, fact by fact: all ranks with the same.

use oxizero_comm::{CommError, Communicator};
use oxizero_core::{ParamSpec, Rank, UnitId};

use crate::EngineError;
use crate::options::{EngineOptions, OptimizerSetup};
use crate::setup::fingerprint;

/// Bytes of a fact that ranks tell each other.
const FACT_BYTES: usize = 256;

/// Compares what the ranks were started with; a collective call.
pub(crate) fn agree(
    specs: &[ParamSpec],
    order: &[UnitId],
    options: &EngineOptions,
    optimizer: &OptimizerSetup,
    comm: &dyn Communicator,
) -> Result<(), EngineError> {
    let mut facts = of_options(options);
    facts.extend(of_optimizer(optimizer));
    facts.push(format!("order = {order:?}"));
    facts.extend(specs.iter().enumerate().flat_map(|(index, spec)| of_param(index, spec)));
    let hashes: Vec<u64> = facts.iter().map(|fact| fingerprint(fact)).collect();
    let own = [fingerprint(&format!("{hashes:?}")), facts.len() as u64];
    let told = exchange(comm, &own)?;
    if told.iter().all(|other| *other == told[0]) {
        return Ok(());
    }
    let common = told.iter().map(|other| other[1] as usize).min().unwrap_or(0);
    let hashes = exchange(comm, &hashes[..common])?;
    let differs = |at: usize| hashes.iter().position(|other| other[at] != hashes[0][at]);
    let first = (0..common).find_map(|at| Some((at, differs(at)?)));
    let longer = || told.iter().position(|other| other[1] != told[0][1]);
    // Two lists of the same facts would have had the same fingerprint.
    let (at, rank) = first.unwrap_or_else(|| (common, longer().unwrap_or(0)));
    let nothing = || "no other parameter".to_owned();
    let [expected, got] = exchange_facts(comm, &facts.get(at).cloned().unwrap_or_else(nothing))
        .map(|facts| [0, rank].map(|rank| facts[rank].clone()))?;
    Err(EngineError::SetupDiffers { rank: Rank(rank), expected, got })
}

fn of_options(options: &EngineOptions) -> Vec<String> {
    let EngineOptions {
        stage,
        mesh,
        bucketing,
        precision,
        accumulation,
        reduction,
        norm,
        clip_norm,
        loss_scaling,
        check_finite,
        align,
    } = options;
    vec![
        format!("stage = {stage:?}"),
        format!("mesh = {mesh:?}"),
        format!("bucketing = {bucketing:?}"),
        format!("precision = {precision:?}"),
        format!("accumulation = {accumulation}"),
        format!("reduction = {reduction:?}"),
        format!("norm = {norm:?}"),
        format!("clip_norm = {clip_norm:?}"),
        format!("loss_scaling = {loss_scaling:?}"),
        format!("check_finite = {check_finite}"),
        format!("align = {align}"),
    ]
}

fn of_optimizer(optimizer: &OptimizerSetup) -> [String; 3] {
    let OptimizerSetup { rule, groups, schedule } = optimizer;
    [
        format!("optimizer rule = {rule:?}"),
        format!("optimizer groups = {groups:?}"),
        format!("schedule = {schedule:?}"),
    ]
}

fn of_param(index: usize, spec: &ParamSpec) -> [String; 9] {
    let ParamSpec { name, aliases, shape, dtype, unit, group, trainable, contributions, along } =
        spec;
    [
        format!("parameter {index} = `{name}`"),
        format!("other names of `{name}` = {aliases:?}"),
        format!("shape of `{name}` = {shape:?}"),
        format!("dtype of `{name}` = {dtype}"),
        format!("unit of `{name}` = {unit}"),
        format!("optimizer group of `{name}` = {}", group.0),
        format!("`{name}` is trained = {trainable}"),
        format!("contributions of `{name}` = {contributions}"),
        format!("`{name}` along the mesh = {along:?}"),
    ]
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

/// The beginning of every rank's fact.
fn exchange_facts(comm: &dyn Communicator, fact: &str) -> Result<Vec<String>, CommError> {
    let fact = &fact[..fact.floor_char_boundary(FACT_BYTES)];
    let mut bytes = [0; FACT_BYTES];
    bytes[..fact.len()].copy_from_slice(fact.as_bytes());
    let text = |bytes: Vec<u8>| {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    };
    Ok(comm.exchange("Engine::new", &bytes)?.into_iter().map(text).collect())
}
