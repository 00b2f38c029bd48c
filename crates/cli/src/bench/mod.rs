//! `oxizero bench`: what the engine does, timed beside plain copies of the same bytes, and what it
//! takes of memory beside what it may.
//!
//! A bench does all that it compares in every round, on all ranks at once, and tells the medians;
//! of memory it tells the most. What it computed is checked on every rank: a fast wrong answer is
//! an error.

mod clock;
mod gradients;
mod known;
mod memory;
mod model;
mod resident;
mod rows;

use clap::{Args, Subcommand};
use oxizero_comm::Communicator;
use oxizero_comm::shm::Replicas;
use oxizero_core::config::RunConfig;
use oxizero_core::{Config, Rank};
use serde::{Deserialize, Serialize};

use crate::error::CliError;
use crate::rank::RankError;

use self::gradients::Gradients;
use self::memory::Memory;

/// `oxizero bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    bench: Bench,
    /// Ranks to start, a process each.
    #[arg(long, value_name = "N", default_value_t = 2, global = true)]
    ranks: usize,
    /// Times that everything is done; medians are shown, and of memory the most.
    #[arg(long, value_name = "K", default_value = "7", value_parser = rounds, global = true)]
    rounds: usize,
    /// Print one JSON object a line, and nothing else.
    #[arg(long, global = true)]
    json: bool,
}

/// What is measured.
#[derive(Clone, Debug, PartialEq, Subcommand, Serialize, Deserialize)]
enum Bench {
    /// A model's gradients, read whole: all at once, and one after the other.
    Gradients(Gradients),
    /// What training takes of a rank's memory at most, beside what its stage may take.
    Memory(Memory),
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

impl BenchJob {
    /// Whose memory the ranks' replicas are to lie in.
    pub(crate) fn replicas(&self) -> Replicas {
        match self.bench {
            Bench::Gradients(_) => Replicas::Shared,
            Bench::Memory(_) => Replicas::Private,
        }
    }
}

impl BenchArguments {
    /// What was asked for, validated: benches that run one after the other.
    pub(crate) fn jobs(&self) -> Result<Vec<BenchJob>, CliError> {
        let run =
            RunConfig { ranks: self.ranks, threads_per_rank: Some(1), ..RunConfig::default() };
        let config = Config { run, ..Config::default() };
        config.validate()?;
        let benches = match &self.bench {
            Bench::Gradients(_) => vec![self.bench.clone()],
            Bench::Memory(memory) => memory.by_wire().into_iter().map(Bench::Memory).collect(),
        };
        let Self { rounds, json, .. } = *self;
        let job = |bench| BenchJob { run: config.run.clone(), bench, rounds, json };
        Ok(benches.into_iter().map(job).collect())
    }
}

/// Benches as one rank of `comm`; rank 0 shows what came of it.
pub(crate) fn run(job: &BenchJob, comm: Box<dyn Communicator>) -> Result<(), RankError> {
    let is_shown = comm.rank() == Rank(0);
    let (title, rows) = match &job.bench {
        Bench::Gradients(gradients) => (gradients.title(), gradients.run(job.rounds, &*comm)?),
        Bench::Memory(memory) => (memory.title(), memory.run(job.rounds, &*comm)?),
    };
    if is_shown {
        let title = format!("{title}; {} ranks, {} rounds", job.run.ranks, job.rounds);
        let shown = if job.json { rows::json(&rows) } else { rows::table(&title, &rows) };
        rows::print(&shown).map_err(RankError::output)?;
    }
    match &job.bench {
        Bench::Memory(memory) if is_shown => memory.check(&rows),
        _ => Ok(()),
    }
}

fn rounds(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(rounds @ 1..) => Ok(rounds),
        _ => Err("allowed: 1 and more".into()),
    }
}
