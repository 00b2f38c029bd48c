//! `oxizero bench`: what the engine does, timed beside plain copies of the same bytes.
//!
//! A bench does all that it compares in every round, on all ranks at once, and tells the medians.
//! What it computed is checked on every rank: a fast wrong answer is an error.

mod clock;
mod gradients;
mod known;
mod model;
mod rows;

use clap::{Args, Subcommand};
use oxizero_comm::Communicator;
use oxizero_core::config::RunConfig;
use oxizero_core::{Config, Rank};
use serde::{Deserialize, Serialize};

use crate::error::CliError;
use crate::rank::RankError;

use self::gradients::Gradients;

/// `oxizero bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    bench: Bench,
    /// Ranks to start, a process each.
    #[arg(long, value_name = "N", default_value_t = 2, global = true)]
    ranks: usize,
    /// Times that everything is done; medians are shown.
    #[arg(long, value_name = "K", default_value = "7", value_parser = rounds, global = true)]
    rounds: usize,
    /// Print one JSON object a line, and nothing else.
    #[arg(long, global = true)]
    json: bool,
}

/// What is timed.
#[derive(Clone, Debug, PartialEq, Subcommand, Serialize, Deserialize)]
enum Bench {
    /// A model's gradients, read whole: all at once, and one after the other.
    Gradients(Gradients),
}

/// A bench, ready to start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BenchJob {
    /// The ranks.
    pub(crate) run: RunConfig,
    bench: Bench,
    rounds: usize,
    json: bool,
}

impl BenchArguments {
    /// The bench that was asked for, validated.
    pub(crate) fn job(&self) -> Result<BenchJob, CliError> {
        let run =
            RunConfig { ranks: self.ranks, threads_per_rank: Some(1), ..RunConfig::default() };
        let config = Config { run, ..Config::default() };
        config.validate()?;
        let Self { bench, rounds, json, .. } = self;
        Ok(BenchJob { run: config.run, bench: bench.clone(), rounds: *rounds, json: *json })
    }
}

/// Benches as one rank of `comm`; rank 0 shows what came of it.
pub(crate) fn run(job: &BenchJob, comm: Box<dyn Communicator>) -> Result<(), RankError> {
    let is_shown = comm.rank() == Rank(0);
    let (title, rows) = match &job.bench {
        Bench::Gradients(gradients) => (gradients.title(), gradients.run(job.rounds, &*comm)?),
    };
    if is_shown {
        let title = format!("{title}; {} ranks, {} rounds", job.run.ranks, job.rounds);
        let shown = if job.json { rows::json(&rows) } else { rows::table(&title, &rows) };
        rows::print(&shown).map_err(RankError::output)?;
    }
    Ok(())
}

fn rounds(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(rounds @ 1..) => Ok(rounds),
        _ => Err("allowed: 1 and more".into()),
    }
}
