//! Faults that are planted: a comparison that misses one of them proves nothing.

use oxizero::EngineOptions;
use oxizero_core::{Along, Batches, DType, Mesh, MeshAxis, Stage};
use oxizero_sim::trial::{Member, Reads, Trained, Trial};
use oxizero_sim::{layouts, odd};

use super::collectives::{CommFault, FaultyComm};
use super::rules::{FaultyRule, RuleFault};
use super::trials::{Named, precision};
use super::{breach_of_wrapped, show};
use crate::error::CliError;

/// What is planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Plant {
    Nothing,
    Comm(CommFault),
    Rule(RuleFault),
    /// Copies of a gradient are said to be gradients of their own.
    CountedCopies,
}

/// What is planted, in words, and whether it must be caught; else it must change nothing.
const PLANTS: [(Plant, &str, bool); 24] = [
    (Plant::Nothing, "no fault", false),
    (Plant::Comm(CommFault::PoisonedMemory), "padding that is not a number", false),
    (Plant::Comm(CommFault::ReadPadding), "padding is read", true),
    (Plant::Comm(CommFault::SwappedShards), "ranks get one another's shards", true),
    (Plant::Comm(CommFault::LostContribution), "a rank's gradients are lost", true),
    (Plant::Comm(CommFault::LostMicroBatch), "the boundary's micro-batch is lost", true),
    (Plant::Comm(CommFault::NarrowSum), "sums are kept in bf16", true),
    (Plant::Comm(CommFault::OtherOrder), "ranks add in another order", true),
    (Plant::Comm(CommFault::OffByOne), "sums are off by one element", true),
    (Plant::Comm(CommFault::IgnoredBroadcast), "a rank ignores broadcasts", true),
    (Plant::Comm(CommFault::SwappedGather), "gathers exchange two ranks", true),
    (Plant::Comm(CommFault::StaleGather), "gathered data is stale on a rank", true),
    (Plant::Comm(CommFault::LostUse), "a parameter's use is lost", true),
    (Plant::Comm(CommFault::InventedUse), "unused parameters decay", true),
    (Plant::Comm(CommFault::LostNorm), "a rank's part of the norm is lost", true),
    (Plant::Comm(CommFault::StaleNorm), "the norm is that of the step before", true),
    (Plant::CountedCopies, "the norm counts a copy twice", true),
    (Plant::Comm(CommFault::OwnCount), "experts divide by their own batches", true),
    (Plant::Comm(CommFault::SwappedParts), "parts change places in the whole", true),
    (Plant::Rule(RuleFault::WrongStep), "updates are miscounted", true),
    (Plant::Rule(RuleFault::Unclipped), "the clip factor is forgotten", true),
    (Plant::Rule(RuleFault::NarrowDivision), "the mean is taken in bf16", true),
    (Plant::Rule(RuleFault::NoDecay), "weight decay is forgotten", true),
    (Plant::Rule(RuleFault::StaleModel), "the model weights are stale", true),
];

/// Plants every fault, and shows which trial caught it and how.
pub(super) fn run(seed: u64) -> Result<(), CliError> {
    let trials: Vec<_> = trials(seed).map(|named| (named.trial.oracle(), named)).collect();
    show(&format!("faults planted under the engine, {} trials, seed {seed}\n", trials.len()))?;
    show(&format!("{:<36}{:>9}  {:<54}how", "fault", "caught by", "the first of them"))?;
    let mut wrong = Vec::new();
    for (plant, words, must_be_caught) in PLANTS {
        let caught = catch(&trials, plant);
        if caught.is_empty() == must_be_caught {
            wrong.push(words);
        }
        let (trial, how) = caught.first().map_or(("-", ""), |(trial, how)| (trial, how));
        show(format!("{words:<36}{:>9}  {trial:<54}{how}", caught.len()).trim_end())?;
    }
    let faults = PLANTS.iter().filter(|(_, _, must_be_caught)| *must_be_caught).count();
    if wrong.is_empty() {
        return show(&format!("\nall {faults} faults are caught"));
    }
    Err(CliError::Run(format!("the comparison is wrong about: {}", wrong.join("; "))))
}

/// The trials in which the fault shows, and how it shows.
fn catch(trials: &[(Vec<Trained>, Named)], plant: Plant) -> Vec<(&str, String)> {
    let wrap = |member: Member| match plant {
        Plant::Nothing => member,
        Plant::Comm(fault) => {
            Member { comm: Box::new(FaultyComm::new(member.comm, fault)), ..member }
        }
        Plant::Rule(fault) => {
            Member { rule: Box::new(FaultyRule { inner: member.rule, fault }), ..member }
        }
        Plant::CountedCopies => member,
    };
    let mut caught = Vec::new();
    for (expected, Named { name, trial }) in trials {
        let wrap = |member: Member| match &trial.options.mesh {
            Some(mesh) if plant == Plant::CountedCopies => count_copies(mesh, member),
            _ => wrap(member),
        };
        let how = breach_of_wrapped(trial, expected, &wrap);
        caught.extend(how.map(|how| (name.as_str(), how)));
    }
    caught
}

fn count_copies(mesh: &Mesh, mut member: Member) -> Member {
    for spec in &mut member.specs {
        let counted = |(index, axis): (usize, &MeshAxis)| match spec.along.get(index) {
            Some(Along::Replicated) => Along::Distinct,
            Some(other) => *other,
            None if axis.batches == Batches::Same => Along::Distinct,
            None => Along::Reduced,
        };
        spec.along = mesh.axes().iter().enumerate().map(counted).collect();
    }
    member
}

/// The odd model in every stage, and that of parts and experts. Where gradients are not read,
/// faults must be caught in norms, weights and states.
fn trials(seed: u64) -> impl Iterator<Item = Named> {
    use DType::{Bf16, F32};
    let [parts, experts] =
        ["tensor", "expert"].map(|axis| layouts::mesh(&[("data", 2), (axis, 2)]));
    let choices = [
        (Reads::All, [Bf16, Bf16, F32], 1, None),
        (Reads::None, [F32, F32, F32], 1, None),
        (Reads::All, [F32, F32, F32], 2, None),
        (Reads::None, [Bf16, Bf16, F32], 2, None),
        (Reads::None, [Bf16, Bf16, F32], 1, Some(parts.clone())),
        (Reads::All, [F32, F32, F32], 2, Some(parts)),
        (Reads::None, [F32, F32, F32], 1, Some(experts.clone())),
        (Reads::All, [Bf16, Bf16, F32], 2, Some(experts)),
    ];
    Stage::ALL.into_iter().flat_map(move |stage| {
        choices.clone().map(|(reads, dtypes, accumulation, mesh)| {
            let options = EngineOptions {
                accumulation,
                clip_norm: Some(2.5),
                ..EngineOptions::new(stage, precision(dtypes))
            };
            let (base, groups) = match mesh {
                None => (Trial { ranks: 3, ..odd::model_of(options) }, String::new()),
                Some(mesh) => {
                    (layouts::model_of(options, &mesh), format!(", {}", layouts::name(&mesh)))
                }
            };
            let trial = Trial { reads, seed, ..base };
            let [weights, ..] = dtypes;
            let (stage, read) = (u8::from(stage), reads == Reads::All);
            let read = if read { ", read" } else { "" };
            let name = format!("stage {stage}, {weights}, windows of {accumulation}{read}{groups}");
            Named { name, trial }
        })
    })
}
