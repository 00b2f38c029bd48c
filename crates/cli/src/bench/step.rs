//! `oxizero bench step`: a whole step of a transformer's parameters, without its arithmetic.
//!
//! `micro_batch` is everything before the step: weights are gathered, gradients come, buckets are
//! reduced. `boundary` is the step that ends the window: what is left to reduce, the norm, the
//! update, and weights made known. The references are copies of the bytes that a rank must move.

use clap::Args;
use oxizero_comm::Communicator;
use oxizero_comm::shm::Replicas;
use oxizero_core::config::Launch;
use oxizero_core::{Bytes, DType, Stage, WorldSize};
use serde::{Deserialize, Serialize};

use super::rows::Row;
use super::steps::{STAGES, Setting};
use super::{Benchmark, model, room};
use crate::args;
use crate::error::CliError;
use crate::rank::RankError;

/// What is trained.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize)]
pub(crate) struct Step {
    /// Elements of the model.
    #[arg(long, value_name = "N", default_value = "134217728", value_parser = model::params)]
    params: usize,
    /// The model's dtype, f32 or bf16; gradients travel in it, and accumulate in f32.
    #[arg(long, value_name = "DTYPE", default_value = "bf16", value_parser = model::dtype)]
    dtype: DType,
    /// ZeRO stage, 0 to 3; 1, 2 and 3 one after the other if absent.
    #[arg(long, value_name = "S", value_parser = args::stage)]
    stage: Option<Stage>,
    /// Each rank has model weights of its own, as frameworks do that write to them.
    #[arg(long)]
    own_weights: bool,
}

/// Of the model; 16 layers.
pub(super) const TENSORS: usize = 150;

impl Benchmark for Step {
    fn title(&self) -> String {
        let Self { params, dtype, own_weights, .. } = self;
        let weights = if *own_weights { "weights of each rank's own" } else { "shared weights" };
        let stage = u8::from(self.stage());
        format!("a step of {params} parameters, {dtype}, {weights}; ZeRO stage {stage}")
    }

    fn replicas(&self) -> Replicas {
        if self.own_weights { Replicas::Private } else { Replicas::Shared }
    }

    fn check_before(&self, world_size: WorldSize, launch: Launch) -> Result<Bytes, CliError> {
        let shares_replicas = !self.own_weights && launch == Launch::Processes;
        let needs = self.setting().needs(world_size, shares_replicas)?;
        room::check("params", &self.params, needs)
    }

    fn run(&self, rounds: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError> {
        self.setting().measure(rounds, comm)
    }
}

impl Step {
    /// One bench for each stage: there is not memory for all at once.
    pub(crate) fn by_stage(self) -> Vec<Self> {
        let stages = self.stage.map_or_else(|| STAGES.to_vec(), |stage| vec![stage]);
        stages.into_iter().map(|stage| Self { stage: Some(stage), ..self.clone() }).collect()
    }

    fn stage(&self) -> Stage {
        self.stage.unwrap_or(STAGES[0])
    }

    fn setting(&self) -> Setting {
        let (dtype, stage) = (self.dtype, self.stage());
        let name = format!("step/stage{}/{dtype}", u8::from(stage));
        Setting { name, specs: model::specs(self.params, TENSORS, dtype), dtype, stage }
    }
}
