//! `oxizero experiment`: trains small models to answer a question, and writes the answer as a page
//! with tables and a chart.
//!
//! Everything runs in this process, ranks as threads, by the loop that `oxizero train` runs.

mod accumulation;
mod chart;
mod gradients;
mod page;
mod report;
mod results;
mod setting;
mod tables;

use clap::{Args, Subcommand};

use self::accumulation::Accumulation;
use crate::error::CliError;

/// `oxizero experiment`.
#[derive(Debug, Args)]
pub(crate) struct ExperimentArguments {
    #[command(subcommand)]
    experiment: Experiment,
}

/// The question.
#[derive(Debug, Subcommand)]
enum Experiment {
    /// What a bf16 gradient accumulator costs: train with it, with an f32 one, and all in f32.
    Accumulation(Accumulation),
}

/// Trains, shows the answer and writes it.
pub(crate) fn run(arguments: &ExperimentArguments) -> Result<(), CliError> {
    match &arguments.experiment {
        Experiment::Accumulation(accumulation) => accumulation.run(),
    }
}
