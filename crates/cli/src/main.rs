//! The `oxizero` command: reads arguments, files and the environment, starts ranks, and shows what
//! they do. Holds nothing that a library user would want.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod checkpoints;
mod data;
mod error;
mod experiment;
mod initial;
mod job;
mod launch;
mod parity;
mod plan;
mod progress;
mod rank;
mod report;
mod run_folder;
mod setup;
mod trainer;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

use crate::args::{Arguments, Command, TrainArguments, read_config};
use crate::bench::BenchJob;
use crate::data::Corpus;
use crate::error::CliError;
use crate::job::Job;
use crate::launch::Work;
use crate::run_folder::RunFolder;

/// Training allocates large blocks in every step; the system's allocator hands them back each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    if let Some(seat) = launch::Seat::from_environment() {
        return launch::run_seat(seat);
    }
    let done = match Arguments::parse().command {
        Command::Train(arguments) => train(&arguments),
        Command::Plan(overrides) => overrides.config().and_then(|config| plan::show(&config)),
        Command::Inspect(arguments) => checkpoints::inspect(&arguments),
        Command::Convert(arguments) => checkpoints::convert(&arguments),
        Command::Parity(arguments) => parity::run(&arguments),
        Command::Experiment(arguments) => experiment::run(&arguments),
        Command::Bench(arguments) => arguments.jobs().and_then(bench_all),
        Command::Launch { words } => return launch_program(words),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error.report(),
    }
}

/// Ranks of another program; the interpreter of Python's scripts is `$PYTHON`, or `python3`.
fn launch_program(words: Vec<OsString>) -> ExitCode {
    let python = env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    ExitCode::from(oxizero_launch::launch(words, &python))
}

/// A bench that came to a bad result does not keep the next from running; anything else does.
fn bench_all(jobs: Vec<BenchJob>) -> Result<(), CliError> {
    let mut result = Ok(());
    for job in jobs {
        // On standard error, so that the rows alone are on standard output.
        error::say(&job.announcement());
        match launch::run(Work::Bench(job)) {
            Err(error @ CliError::Run(_)) => result = result.and(Err(error)),
            done => done?,
        }
    }
    result
}

/// Everything that can be refused is, before the folder is made and a rank is started.
fn train(arguments: &TrainArguments) -> Result<(), CliError> {
    let (config, resume) = match &arguments.resume {
        None => (arguments.config()?, None),
        Some(run) => {
            let checkpoint = checkpoints::of_run(run).open(None)?;
            let before = read_config(&run_folder::config_path(run))?;
            let config = arguments.overrides.config_after(before)?;
            (config, Some(checkpoint))
        }
    };
    let init = arguments.init_from.clone();
    init.iter().try_for_each(|path| initial::check(path, &config))?;
    let corpus = Corpus::load(&config)?;
    resume.iter().try_for_each(|checkpoint| checkpoints::refuse_other(checkpoint, &corpus))?;
    let resume = resume.map(|checkpoint| checkpoint.folder().to_path_buf());
    let run_folder = RunFolder::create(&config)?;
    let folder = run_folder.path().to_path_buf();
    let (json, trace) = (arguments.json, arguments.trace.clone());
    let job = Job { config, folder, json, resume, init, trace, corpus };
    let done = launch::run(Work::Train(Box::new(job)));
    if let Err(CliError::Interrupted { .. }) = done {
        return Err(CliError::Interrupted { left: run_folder.interrupted() });
    }
    if done.is_err() {
        run_folder.remove_unless_trained();
    }
    done
}
