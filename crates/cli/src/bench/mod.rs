//! `oxizero bench`: what the engine does, timed beside plain copies of the same bytes, and what it
//! takes of memory beside what it may.
//!
//! A bench does all that it compares in every round, on all ranks at once, and tells the medians;
//! of memory it tells the most. What it computed is checked on every rank: a fast wrong answer is
//! an error.

mod checkpoint;
mod clock;
mod collectives;
mod copies;
mod gradients;
mod hash;
mod known;
mod latency;
mod memory;
mod micro_batch;
mod model;
mod moved;
mod optimizer;
mod overhead;
mod pattern;
mod resident;
mod room;
mod rows;
mod step;
mod steps;

use clap::{Args, Subcommand};
use oxizero_comm::Communicator;
use oxizero_comm::shm::Replicas;
use oxizero_core::config::{Launch, RunConfig};
use oxizero_core::{Bytes, Config, Rank, WorldSize, counted};
use serde::{Deserialize, Serialize};

use crate::args;
use crate::error::CliError;
use crate::rank::RankError;

use self::checkpoint::Checkpoints;
use self::collectives::Collectives;
use self::gradients::Gradients;
use self::memory::Memory;
use self::optimizer::Updates;
use self::overhead::Overhead;
use self::rows::Row;
use self::step::Step;

/// `oxizero bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArguments {
    #[command(subcommand)]
    bench: Bench,
    /// Ranks to start; 2, and for the optimizer 1.
    #[arg(long, value_name = "N", global = true)]
    ranks: Option<usize>,
    /// What a rank is: processes share memory, threads copy.
    #[arg(
        long,
        value_name = "KIND",
        default_value = "processes",
        value_parser = args::launch,
        global = true
    )]
    launch: Launch,
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
    /// A checkpoint saved, loaded, and saved in the background, beside plain files.
    Checkpoint(Checkpoints),
    /// Reduce-scatter, all-reduce and all-gather of large tensors, and how long a small one takes.
    Collectives(Collectives),
    /// A model's gradients, read whole: all at once, and one after the other.
    Gradients(Gradients),
    /// What training takes of a rank's memory at most, beside what its stage may take.
    Memory(Memory),
    /// Updates of one large parameter, by each rule.
    Optimizer(Updates),
    /// What the engine itself costs: the time for each of many small parameters.
    Overhead(Overhead),
    /// A whole step, without the model's arithmetic, beside the bytes that it must move.
    Step(Step),
}

/// What every bench has.
trait Benchmark {
    /// What is measured, in words.
    fn title(&self) -> String;

    /// Ranks, where nobody asked for a number of them.
    fn ranks(&self) -> usize {
        2
    }

    /// Whose memory the ranks' replicas are to lie in.
    fn replicas(&self) -> Replicas {
        Replicas::Shared
    }

    /// Refuses what this machine cannot do with so many ranks, before one is started; returns the
    /// memory that all of them need at least.
    fn check_before(&self, world_size: WorldSize, launch: Launch) -> Result<Bytes, CliError>;

    /// Every rank calls it, and returns the same names and hashes.
    fn run(&self, rounds: usize, comm: &dyn Communicator) -> Result<Vec<Row>, RankError>;

    /// What is wrong with what was measured, as an error.
    fn judge(&self, _rows: &[Row]) -> Result<(), RankError> {
        Ok(())
    }
}

impl Bench {
    fn benchmark(&self) -> &dyn Benchmark {
        match self {
            Self::Checkpoint(checkpoints) => checkpoints,
            Self::Collectives(collectives) => collectives,
            Self::Gradients(gradients) => gradients,
            Self::Memory(memory) => memory,
            Self::Optimizer(updates) => updates,
            Self::Overhead(overhead) => overhead,
            Self::Step(step) => step,
        }
    }

    /// The parts that run one after the other, in ranks of their own.
    fn in_turn(self) -> Vec<Self> {
        match self {
            Self::Memory(memory) => memory.by_wire().into_iter().map(Self::Memory).collect(),
            Self::Overhead(overhead) => {
                overhead.by_stage().into_iter().map(Self::Overhead).collect()
            }
            Self::Step(step) => step.by_stage().into_iter().map(Self::Step).collect(),
            whole => vec![whole],
        }
    }
}

/// A bench, ready to start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BenchJob {
    /// The ranks.
    pub(crate) run: RunConfig,
    bench: Bench,
    rounds: usize,
    json: bool,
    /// Bytes that all ranks need at least.
    needs: usize,
}

impl BenchJob {
    /// What is about to run, and the memory that it takes.
    pub(crate) fn announcement(&self) -> String {
        format!("running: {}; takes {} of memory", self.title(), Bytes(self.needs))
    }

    /// What is measured, on how many ranks and how often.
    fn title(&self) -> String {
        let (ranks, rounds) = (counted(self.run.ranks, "rank"), counted(self.rounds, "round"));
        format!("{}; {ranks}, {rounds}", self.bench.benchmark().title())
    }

    /// Whose memory the ranks' replicas are to lie in.
    pub(crate) fn replicas(&self) -> Replicas {
        self.bench.benchmark().replicas()
    }
}

impl BenchArguments {
    /// What was asked for, validated: benches that run one after the other.
    pub(crate) fn jobs(self) -> Result<Vec<BenchJob>, CliError> {
        let Self { bench, ranks, launch, rounds, json } = self;
        let ranks = ranks.unwrap_or_else(|| bench.benchmark().ranks());
        let run = RunConfig { ranks, launch, threads_per_rank: Some(1), ..RunConfig::default() };
        let config = Config { run, ..Config::default() };
        config.validate()?;
        let world_size = WorldSize::new(ranks).expect("a valid configuration has ranks");
        let job = |bench: Bench| {
            let needs = bench.benchmark().check_before(world_size, launch)?.0;
            Ok(BenchJob { run: config.run.clone(), bench, rounds, json, needs })
        };
        bench.in_turn().into_iter().map(job).collect()
    }
}

/// Benches as one rank of `comm`; rank 0 shows what came of it.
pub(crate) fn run(job: &BenchJob, comm: Box<dyn Communicator>) -> Result<(), RankError> {
    let bench = job.bench.benchmark();
    let rows = bench.run(job.rounds, &*comm)?;
    if comm.rank() != Rank(0) {
        return Ok(());
    }
    let shown = if job.json { rows::json(&rows) } else { rows::table(&job.title(), &rows) };
    rows::print(&shown).map_err(RankError::output)?;
    bench.judge(&rows)
}

/// More take years.
const ROUNDS_MAX: usize = 100_000;

fn rounds(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(rounds @ 1..=ROUNDS_MAX) => Ok(rounds),
        _ => Err(format!("allowed: 1 to {ROUNDS_MAX}")),
    }
}
