//! The command line. A flag overrides the configuration's field.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use oxizero_core::config::Launch;
use oxizero_core::{Config, Stage, WorldSize};

use crate::bench::BenchArguments;
use crate::checkpoints::{ConvertArguments, InspectArguments};
use crate::data::read_file;
use crate::error::CliError;
use crate::experiment::ExperimentArguments;
use crate::initial;
use crate::parity::ParityArguments;

const EXIT_CODES: &str = "\
Exit codes: 0 done, 1 the run failed, 2 the arguments, the configuration or the text were refused,
130 interrupted, 141 nobody reads the output any more.";

/// Trains models sharded over ranks: ZeRO stages 0 to 3.
#[derive(Debug, Parser)]
#[command(name = "oxizero", version, arg_required_else_help = true, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a transformer on text, over several ranks of this machine.
    Train(TrainArguments),
    /// Show how many bytes each rank would hold, before anything is allocated.
    Plan(Overrides),
    /// Show what is in a run's latest checkpoint, or in the checkpoint of a folder.
    Inspect(InspectArguments),
    /// Write a checkpoint's weights as files that others read.
    Convert(ConvertArguments),
    /// Time what the engine does beside plain copies, and measure the memory that it takes.
    Bench(BenchArguments),
    /// Train as the engine does and as a plain loop does, and show that the numbers are the same.
    Parity(ParityArguments),
    /// Train small models to answer a question, and write a page with tables and a chart.
    Experiment(ExperimentArguments),
    /// Start a script of yours as several ranks, with the environment that torchrun sets.
    #[command(disable_help_flag = true)]
    Launch {
        /// Read by the launcher; `oxizero launch --help` shows them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<OsString>,
    },
}

/// `oxizero train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArguments {
    #[command(flatten)]
    pub(crate) overrides: Overrides,
    /// Print one JSON object a line, and nothing else.
    #[arg(long)]
    pub(crate) json: bool,
    /// Go on from a run's latest checkpoint, in a run of its own; with other ranks, micro-batches
    /// are accumulated so that the global batch stays. The run's configuration, if none is given.
    #[arg(long, value_name = "RUN")]
    pub(crate) resume: Option<PathBuf>,
    /// Start from the weights of a safetensors file, or of a folder as on the Hugging Face hub,
    /// whose config.json then tells the model (llama or gpt2); the optimizer starts anew.
    #[arg(long, value_name = "PATH", conflicts_with = "resume")]
    pub(crate) init_from: Option<PathBuf>,
    /// Write what each rank does, and when, for Perfetto or Chrome's tracing page; of several
    /// ranks, rank 2's is FILE with a 2 before its extension.
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
}

impl TrainArguments {
    /// The configuration of a run that goes on from none.
    pub(crate) fn config(&self) -> Result<Config, CliError> {
        match &self.init_from {
            None => self.overrides.config(),
            Some(init) => self.overrides.config_from(init),
        }
    }
}

/// The configuration and what overrides it.
#[derive(Debug, Default, Args)]
pub(crate) struct Overrides {
    /// A TOML file; every field has a default.
    #[arg(value_name = "CONFIG.toml")]
    config: Option<PathBuf>,
    /// Ranks to start [run.ranks].
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
    /// ZeRO stage, 0 to 3 [zero.stage].
    #[arg(long, value_name = "S", value_parser = stage)]
    stage: Option<Stage>,
    /// Optimizer steps [train.steps].
    #[arg(long, value_name = "K")]
    steps: Option<usize>,
    /// A text file, or a folder of them; the Rust sources of this build if absent [data.path].
    #[arg(long, value_name = "PATH")]
    data: Option<String>,
    /// A tokenizer.json as on the Hugging Face hub, to read the text by; bytes if absent
    /// [data.tokenizer].
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<String>,
    /// Seed of weights, data order and split [train.seed].
    #[arg(long, value_name = "SEED")]
    seed: Option<u64>,
    /// Ranks are threads of one process [run.launch].
    #[arg(long)]
    in_process: bool,
    /// Threads a rank calculates with [run.threads_per_rank].
    #[arg(long, value_name = "T")]
    threads_per_rank: Option<usize>,
    /// Sequences in a rank's micro-batch [train.micro_batch_size].
    #[arg(long, value_name = "B")]
    micro_batch: Option<usize>,
    /// Micro-batches a rank accumulates before a step [train.gradient_accumulation_steps].
    #[arg(long, value_name = "A")]
    accumulation: Option<usize>,
    /// Most bytes of weights in a bucket; a bucket a unit if absent [zero.bucket_bytes_max].
    #[arg(long, value_name = "BYTES")]
    bucket_bytes: Option<usize>,
    /// Steps between checkpoints; none if 0 [train.save_every].
    #[arg(long, value_name = "K")]
    save_every: Option<usize>,
    /// Checkpoints that are kept; all if 0 [train.keep_last].
    #[arg(long, value_name = "N")]
    keep_last: Option<usize>,
    /// Where results go; a new or an empty folder [run.folder].
    #[arg(long, value_name = "DIR")]
    run_folder: Option<String>,
}

impl Overrides {
    /// The configuration of a run that goes on, given that of the one before: with the same global
    /// batch, unless its parts are asked for. Validated.
    pub(crate) fn config_after(&self, before: Config) -> Result<Config, CliError> {
        let batch = before.global_batch();
        let mut config = match &self.config {
            Some(path) => read_config(path)?,
            None => before,
        };
        config.run.folder = None;
        self.apply(&mut config);
        config.validate()?;
        if self.config.is_none() && self.accumulation.is_none() && self.micro_batch.is_none() {
            let ranks = WorldSize::new(config.run.ranks).expect("validate() refuses no ranks");
            let accumulation = batch.accumulation(ranks).map_err(|why| {
                CliError::Data(format!("{why}; or give --micro-batch or --accumulation"))
            })?;
            config.train.gradient_accumulation_steps = accumulation;
        }
        Ok(config)
    }

    /// The configuration file with the flags in, validated.
    pub(crate) fn config(&self) -> Result<Config, CliError> {
        self.config_with(|_| Ok(()))
    }

    /// The configuration of a run that starts from the weights in `init`, whose model is theirs.
    pub(crate) fn config_from(&self, init: &Path) -> Result<Config, CliError> {
        let Some(told) = initial::told(init)? else { return self.config() };
        let text = self.config.as_deref().map(read_text).transpose()?.unwrap_or_default();
        self.config_with(|config| told.put_in(&mut config.model, &Config::stated_in_model(&text)))
    }

    fn config_with(
        &self,
        adjust: impl FnOnce(&mut Config) -> Result<(), CliError>,
    ) -> Result<Config, CliError> {
        let file = self.config.as_deref().map(read_config).transpose()?;
        let mut config = file.clone().unwrap_or_default();
        self.apply(&mut config);
        adjust(&mut config)?;
        config.validate().map_err(|why| match (&self.config, file) {
            (Some(path), Some(file)) if file.validate() == Err(why.clone()) => {
                CliError::ConfigFile { path: path.into(), why }
            }
            _ => CliError::Config(why),
        })?;
        Ok(config)
    }

    fn apply(&self, config: &mut Config) {
        set(&mut config.run.ranks, self.ranks);
        set(&mut config.zero.stage, self.stage);
        set(&mut config.train.steps, self.steps);
        set(&mut config.train.seed, self.seed);
        set(&mut config.train.micro_batch_size, self.micro_batch);
        set(&mut config.train.gradient_accumulation_steps, self.accumulation);
        set(&mut config.train.save_every, self.save_every);
        set(&mut config.train.keep_last, self.keep_last);
        set(&mut config.run.launch, self.in_process.then_some(Launch::Threads));
        set_some(&mut config.data.path, &self.data);
        set_some(&mut config.data.tokenizer, &self.tokenizer);
        set_some(&mut config.run.threads_per_rank, &self.threads_per_rank);
        set_some(&mut config.zero.bucket_bytes_max, &self.bucket_bytes);
        set_some(&mut config.run.folder, &self.run_folder);
    }
}

pub(crate) fn read_text(path: &Path) -> Result<String, CliError> {
    String::from_utf8(read_file(path)?)
        .map_err(|_| CliError::path("read", path)(io::Error::other("it is no UTF-8 text")))
}

pub(crate) fn read_config(path: &Path) -> Result<Config, CliError> {
    let text = read_text(path)?;
    Config::from_toml(&text).map_err(|why| CliError::ConfigFile { path: path.into(), why })
}

fn set<T: Copy>(field: &mut T, flag: Option<T>) {
    *field = flag.unwrap_or(*field);
}

fn set_some<T: Clone>(field: &mut Option<T>, flag: &Option<T>) {
    if flag.is_some() {
        field.clone_from(flag);
    }
}

/// Reads a ZeRO stage, for clap.
pub(crate) fn stage(text: &str) -> Result<Stage, String> {
    let number: u8 = text.parse().map_err(|_| "allowed: 0, 1, 2, 3".to_owned())?;
    Stage::try_from(number)
}

/// Reads what a rank is, for clap.
pub(crate) fn launch(text: &str) -> Result<Launch, String> {
    match text {
        "processes" => Ok(Launch::Processes),
        "threads" => Ok(Launch::Threads),
        _ => Err("allowed: processes, threads".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overrides(flags: &str) -> Overrides {
        let words = ["oxizero", "plan"].into_iter().chain(flags.split_whitespace());
        match Arguments::try_parse_from(words).unwrap().command {
            Command::Plan(overrides) => overrides,
            _ => unreachable!("plan was asked for"),
        }
    }

    #[test]
    fn the_command_line_is_well_formed() {
        <Arguments as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn every_flag_overrides_its_field() {
        let flags = "--ranks 3 --stage 1 --steps 9 --data d --seed 4 --in-process \
                     --threads-per-rank 2 --micro-batch 5 --accumulation 6 --bucket-bytes 7 \
                     --save-every 8 --keep-last 3 --run-folder f --tokenizer t.json";
        let config = overrides(flags).config().unwrap();
        let mut expected = Config::default();
        expected.run.ranks = 3;
        expected.zero.stage = Stage::Zero1;
        expected.train.steps = 9;
        expected.data.path = Some("d".into());
        expected.data.tokenizer = Some("t.json".into());
        expected.train.seed = 4;
        expected.train.save_every = 8;
        expected.train.keep_last = 3;
        expected.run.launch = Launch::Threads;
        expected.run.threads_per_rank = Some(2);
        expected.train.micro_batch_size = 5;
        expected.train.gradient_accumulation_steps = 6;
        expected.zero.bucket_bytes_max = Some(7);
        expected.run.folder = Some("f".into());
        assert_eq!(config, expected);
    }

    #[test]
    fn flags_are_validated_with_the_configuration() {
        let error = overrides("--ranks 0").config().unwrap_err();
        assert!(error.to_string().contains("run.ranks = 0"), "{error}");
    }
}
