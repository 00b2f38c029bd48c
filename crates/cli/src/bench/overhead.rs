//! `oxizero bench overhead`: what the engine itself costs, where there is next to nothing to move.
//!
//! Many small parameters are trained as in `bench step`; what is told is the time a parameter. The
//! copies of the bytes that must be moved are a small part of it.

use clap::Args;
use oxizero_comm::Communicator;
use oxizero_core::config::Launch;
use oxizero_core::{Bytes, DType, ParamSpec, Stage, UnitId, WorldSize};
use serde::{Deserialize, Serialize};

use super::rows::{MICROSECONDS_A_PARAM, Row};
use super::steps::{STAGES, Setting};
use super::{Benchmark, model, room};
use crate::args;
use crate::error::CliError;
use crate::rank::RankError;

/// What is trained.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct Overhead {
    /// Parameters.
    #[arg(long, value_name = "N", default_value = "10000", value_parser = params)]
    params: usize,
    /// Elements of each.
    #[arg(long, value_name = "N", default_value = "64", value_parser = numel)]
    numel: usize,
    /// The model's dtype, f32 or bf16; gradients travel in it, and accumulate in f32.
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = model::dtype)]
    dtype: DType,
    /// ZeRO stage, 0 to 3; 1, 2 and 3 one after the other if absent.
    #[arg(long, value_name = "S", value_parser = args::stage)]
    stage: Option<Stage>,
}

/// Parameters that are used, and communicated, together.
const UNIT_PARAMS: usize = 100;

impl Benchmark for Overhead {
    fn title(&self) -> String {
        let Self { params, numel, dtype, .. } = self;
        let stage = u8::from(self.stage());
        format!("{params} parameters of {numel} elements, {dtype}; ZeRO stage {stage}")
    }

    fn check_before(&self, world_size: WorldSize, launch: Launch) -> Result<Bytes, CliError> {
        let needs = self.setting().needs(world_size, launch == Launch::Processes)?;
        room::check("params", &self.params, needs)
    }

    fn run(&self, rounds: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError> {
        let rows = self.setting().measure(rounds, comm)?;
        let microseconds = 1e-6 * self.params as f64;
        Ok(rows.into_iter().map(|row| row.each(microseconds, MICROSECONDS_A_PARAM)).collect())
    }
}

impl Overhead {
    /// One bench for each stage.
    pub(crate) fn by_stage(self) -> Vec<Self> {
        let stages = self.stage.map_or_else(|| STAGES.to_vec(), |stage| vec![stage]);
        stages.into_iter().map(|stage| Self { stage: Some(stage), ..self.clone() }).collect()
    }

    fn stage(&self) -> Stage {
        self.stage.unwrap_or(STAGES[0])
    }

    fn setting(&self) -> Setting {
        let (dtype, stage) = (self.dtype, self.stage());
        let spec = |index: usize| {
            let unit = UnitId(index / UNIT_PARAMS);
            ParamSpec::new(index.to_string(), &[self.numel], dtype, unit)
        };
        let specs = (0..self.params).map(spec).collect();
        Setting { name: format!("overhead/stage{}/{dtype}", u8::from(stage)), specs, dtype, stage }
    }
}

fn params(text: &str) -> Result<usize, String> {
    count(text, 1..=1_000_000)
}

fn numel(text: &str) -> Result<usize, String> {
    count(text, 1..=1 << 20)
}

fn count(text: &str, allowed: std::ops::RangeInclusive<usize>) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| allowed.contains(number));
    number.ok_or_else(|| format!("allowed: {} to {}", allowed.start(), allowed.end()))
}
