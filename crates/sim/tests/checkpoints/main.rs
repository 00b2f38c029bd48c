//! What is saved in one world is loaded in another, and training goes on.
#![expect(clippy::unwrap_used, reason = "what fails here fails the test")]

mod background;
mod cases;
mod errors;
mod killed;
mod resumed;
mod worlds;

use std::path::Path;

use oxizero::{Engine, EngineError, LoadOptions, Loaded, RunFolder, SaveOptions, StepOutcome};
use oxizero_checkpoint::{Checkpoint, Role, Tensor, Training};
use oxizero_core::Random;
use oxizero_sim::trial::{At, Trial};

/// Every number of an engine that training goes on from.
#[derive(Clone, Debug, PartialEq)]
struct State {
    weights: Vec<Vec<u32>>,
    /// By parameter: master weights, then states.
    states: Vec<Vec<Vec<u32>>>,
    applied_steps: u64,
    loss_scale: u32,
}

fn state_of(trial: &Trial, engine: &mut Engine) -> State {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let weights = trial.weights(engine).unwrap().into_iter().map(bits).collect();
    let states = trial.states(engine).unwrap().into_iter();
    let states = states.map(|states| states.into_iter().map(bits).collect()).collect();
    let (applied_steps, loss_scale) = (engine.applied_steps(), engine.loss_scale().get());
    State { weights, states, applied_steps, loss_scale: loss_scale.to_bits() }
}

/// One gradient of every parameter, which differs on every rank.
fn backward(at: At, weights: &[f32]) -> Vec<Vec<f32>> {
    let mut random = Random::for_path(6, &[at.step as u64, at.rank as u64, at.param as u64]);
    vec![weights.iter().map(|_| random.normal()).collect()]
}

/// Runs windows, and returns what happened in each.
fn train(trial: &Trial, engine: &mut Engine, steps: std::ops::Range<usize>) -> Vec<StepOutcome> {
    steps.map(|step| trial.window(engine, step).unwrap().0).collect()
}

fn save(engine: &mut Engine, folder: &Path) -> Result<(), EngineError> {
    engine.save(&RunFolder::new(folder), &SaveOptions::default()).map(drop)
}

fn load(engine: &mut Engine, folder: &Path) -> Result<Loaded, EngineError> {
    engine.load(&RunFolder::new(folder), None, LoadOptions::default())
}

/// Every tensor of the latest checkpoint with its whole elements, sorted by role and name; and what
/// it says of parameters and training.
fn contents(folder: &Path) -> (Vec<(Role, String, Vec<u8>)>, String) {
    let mut checkpoint = RunFolder::new(folder).open(None).unwrap();
    let names = |tensor: &Tensor| (tensor.role.clone(), tensor.name.clone());
    let found: Vec<_> = checkpoint.manifest().tensors.iter().map(names).collect();
    let mut tensors: Vec<_> = found
        .into_iter()
        .enumerate()
        .map(|(index, (role, name))| (role, name, checkpoint.read_whole(index).unwrap()))
        .collect();
    tensors.sort_by_key(|(role, name, _)| (role.to_string(), name.clone()));
    let manifest = checkpoint.manifest();
    let counted = |param: &oxizero_checkpoint::Param| (param.name.clone(), param.updates.clone());
    let params: Vec<_> = manifest.params.iter().map(counted).collect();
    // What people read of the rule says what it runs on, too.
    let training = Training { rule: String::new(), ..manifest.training.clone() };
    (tensors, format!("{params:?} {training:?}"))
}

/// The f32 elements of a parameter's weights.
fn weights_of(checkpoint: &mut Checkpoint, name: &str) -> Vec<f32> {
    let tensor = checkpoint.weights_of(name).unwrap();
    let bytes = checkpoint.read_whole(tensor).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}
