//! `oxizero bench optimizer`: updates of one parameter, beside copies of the bytes that they move.
//!
//! An update reads the gradient, the f32 master weight and the states of each element, and writes
//! the masters, the states and the bf16 model weights, in one pass on one thread. The reference
//! `copies/NB` are plain copies that read and write together as many bytes, N an element. Before
//! each update everything is as it was before the first, so that every round computes the same.

use clap::{Args, ValueEnum};
use oxizero_comm::Communicator;
use oxizero_core::config::Launch;
use oxizero_core::{Bytes, DType, Numel, WorldSize};
use oxizero_device::{Buffer, kernels};
use oxizero_optim::{
    Adam, AdamW, Gradient, Hyper, MomentOptions, Momentum, Optimizer, Sgd, Weights,
};
use serde::{Deserialize, Serialize};

use super::clock::{Clock, Lap};
use super::copies::Copies;
use super::rows::{NANOSECONDS_A_PARAM, Row};
use super::{Benchmark, hash, model, pattern, room};
use crate::error::CliError;
use crate::rank::RankError;

/// What is updated.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct Updates {
    /// Elements of the parameter.
    #[arg(long, value_name = "N", default_value = "134217728", value_parser = model::params)]
    params: usize,
    /// The update rule; all of them in turn if absent.
    #[arg(long, value_name = "RULE")]
    rule: Option<Rule>,
    /// The dtype of gradients, f32 or bf16; both in turn if absent.
    #[arg(long, value_name = "DTYPE", value_parser = model::dtype)]
    grads: Option<DType>,
}

/// An update rule, with the defaults of `torch.optim`; SGD with a momentum of 0.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[value(rename_all = "lower")]
enum Rule {
    AdamW,
    Adam,
    Sgd,
}

const GRADS: [DType; 2] = [DType::F32, DType::Bf16];
const MODEL: DType = DType::Bf16;
/// The most that a rule keeps.
const STATES: usize = 2;

const HYPER: Hyper = Hyper { lr: 1e-3, weight_decay: 0.1 };
/// The number of the update: not the first, which is simpler.
const STEP: u64 = 3;
const DIVISOR: f32 = 3.0;
const FACTOR: f32 = 0.75;

impl Benchmark for Updates {
    fn title(&self) -> String {
        format!("updates of {} parameters on one thread; {MODEL} model", self.params)
    }

    fn ranks(&self) -> usize {
        1
    }

    fn check_before(&self, world_size: WorldSize, _: Launch) -> Result<Bytes, CliError> {
        let a_param = DType::F32.size() * (1 + STATES)
            + MODEL.size()
            + self.grads().iter().map(|dtype| dtype.size()).sum::<usize>();
        room::check("params", &self.params, Bytes(self.params * a_param) * world_size.get())
    }

    fn run(&self, rounds: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError> {
        let mut parameter = Parameter::new(self.params, &self.grads());
        let moved_max = Bytes(self.params * Rule::AdamW.moved(DType::F32));
        let (mut copies, mut clock) = (Copies::new(moved_max), Clock::default());
        let mut hashes = Vec::new();
        for round in 0..rounds {
            for rule in self.rules() {
                for grads in 0..self.grads().len() {
                    let name = parameter.time(rule, grads, &mut copies, &mut clock, comm)?;
                    if round + 1 == rounds {
                        let hash = parameter.hash(&name, rule.rule().state_names().len())?;
                        hashes.push((hash::same(&hash, &name, comm)?, name));
                    }
                }
            }
        }
        let mut rows = clock.rows(comm.world_size().get());
        for row in &mut rows {
            let hash = hashes.iter().find(|(_, name)| *name == row.name);
            row.hash = hash.map(|(hash, _)| hash.clone());
        }
        let nanoseconds = 1e-9 * self.params as f64;
        Ok(rows.into_iter().map(|row| row.each(nanoseconds, NANOSECONDS_A_PARAM)).collect())
    }
}

impl Updates {
    fn rules(&self) -> Vec<Rule> {
        self.rule.map_or_else(|| Rule::value_variants().to_vec(), |rule| vec![rule])
    }

    fn grads(&self) -> Vec<DType> {
        self.grads.map_or_else(|| GRADS.to_vec(), |dtype| vec![dtype])
    }
}

impl Rule {
    fn name(self) -> &'static str {
        match self {
            Self::AdamW => "adamw",
            Self::Adam => "adam",
            Self::Sgd => "sgd",
        }
    }

    fn rule(self) -> Box<dyn Optimizer> {
        let defaults = MomentOptions::default();
        match self {
            Self::AdamW => Box::new(AdamW::new(defaults).expect(NUMBERS)),
            Self::Adam => Box::new(Adam::new(defaults).expect(NUMBERS)),
            Self::Sgd => Box::new(Sgd::new(Momentum::Classical(0.9)).expect(NUMBERS)),
        }
    }

    /// Bytes that an update moves an element: it reads the gradient, reads and writes master and
    /// states, and writes the model weight.
    fn moved(self, grads: DType) -> usize {
        let kept = 1 + self.rule().state_names().len();
        grads.size() + 2 * kept * DType::F32.size() + MODEL.size()
    }
}

const NUMBERS: &str = "the rule's numbers are possible ones";

/// One parameter, and what belongs to it.
struct Parameter {
    grads: Vec<Buffer>,
    master: Buffer,
    states: Vec<Buffer>,
    model: Buffer,
}

/// Elements repeat after so many, which no power of two is a multiple of.
const PERIOD: usize = 1021;

/// Element `index` of the gradients; exact in bf16.
fn grad(index: usize) -> f32 {
    (index % 127) as f32 / 64.0 - 1.0
}

/// Element `index` of the masters before an update.
fn master(index: usize) -> f32 {
    1.0 + index as f32 / 1024.0
}

/// Element `index` of state number `state` before an update.
fn state(state: usize, index: usize) -> f32 {
    (index % 5 + state + 1) as f32 / 1024.0
}

impl Parameter {
    /// Gradients in each of these dtypes are there beside each other.
    fn new(numel: usize, grads: &[DType]) -> Self {
        let numel = Numel(numel);
        let given = |dtype: &DType| {
            let mut grads = Buffer::mapped(numel, *dtype);
            pattern::fill(grads.view_mut(), 0, PERIOD, grad);
            grads
        };
        let f32 = || Buffer::mapped(numel, DType::F32);
        Self {
            grads: grads.iter().map(given).collect(),
            master: f32(),
            states: (0..STATES).map(|_| f32()).collect(),
            model: Buffer::mapped(numel, MODEL),
        }
    }

    /// One update by the gradients with this index, after copies of as many bytes; its name.
    fn time(
        &mut self,
        rule: Rule,
        grads: usize,
        copies: &mut Copies,
        clock: &mut Clock,
        comm: &dyn Communicator,
    ) -> Result<String, RankError> {
        self.reset();
        let grads = &self.grads[grads];
        let (numel, moved) = (grads.numel().0, rule.moved(grads.dtype()));
        let reference = format!("copies/{moved}B");
        copies.time(Bytes(numel * moved), &reference, clock, comm)?;
        let name = format!("{}/{}/{numel}", rule.name(), grads.dtype());
        let rule = rule.rule();
        let kept = rule.state_names().len();
        let mut states: Vec<_> = self.states[..kept].iter_mut().map(Buffer::view_mut).collect();
        let (master, model) = (self.master.view_mut(), Some(self.model.view_mut()));
        let weights = Weights { master, states: &mut states, model };
        let grad = Gradient { values: grads.view(), divisor: DIVISOR, factor: FACTOR };
        let lap = Lap::start(comm)?;
        rule.update(HYPER, STEP, grad, weights);
        clock.stop(lap, &name, &reference, comm)?;
        Ok(name)
    }

    /// Everything but the gradients is as it was before the first update.
    fn reset(&mut self) {
        pattern::fill(self.master.view_mut(), 0, PERIOD, master);
        for (number, kept) in self.states.iter_mut().enumerate() {
            pattern::fill(kept.view_mut(), 0, PERIOD, |index| state(number, index));
        }
        kernels::fill(self.model.view_mut(), 0.0);
    }

    /// Of the elements until they repeat: masters, `kept` states, and model weights. That all
    /// others repeat them is checked.
    fn hash(&self, what: &str, kept: usize) -> Result<Vec<u8>, RankError> {
        let states = self.states[..kept].iter();
        let buffers = || [&self.master].into_iter().chain(states.clone()).chain([&self.model]);
        for buffer in buffers() {
            if !pattern::repeats(buffer.view(), PERIOD) {
                return Err(RankError::Contents(format!("{what}: like elements differ")));
            }
        }
        Ok(hash::of(buffers().map(|buffer| buffer.range(0..PERIOD).bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_moves_what_its_rule_keeps() {
        let moved = |grads| [Rule::AdamW, Rule::Adam, Rule::Sgd].map(|rule| rule.moved(grads));
        assert_eq!(moved(DType::F32), [4 + 24 + 2, 4 + 24 + 2, 4 + 16 + 2]);
        assert_eq!(moved(DType::Bf16), [2 + 24 + 2, 2 + 24 + 2, 2 + 16 + 2]);
    }
}
