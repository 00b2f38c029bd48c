//! The experiment on gradient accumulation: what is trained, how often, and where results go.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use clap::Args;
use oxizero::Backend;
use oxizero_core::config::{Launch, ModelConfig, RunConfig, TrainConfig};
use oxizero_core::{Config, Rank};

use super::gradients::{Masters, Probe};
use super::page::Page;
use super::report::{self, Files, Origin};
use super::results::{Results, Run};
use super::setting::Setting;
use crate::data::{Corpus, bigram_entropy};
use crate::error::CliError;
use crate::job::Job;
use crate::launch;
use crate::progress::Event;
use crate::rank::{self, RankError, Trained};
use crate::run_folder::RunFolder;
use crate::trainer::Trainer;

/// `oxizero experiment accumulation`.
#[derive(Debug, Args)]
pub(super) struct Accumulation {
    /// Optimizer steps of each of the runs.
    #[arg(long, value_name = "K", default_value_t = STEPS)]
    steps: usize,
    /// Seeds to train with, such as 0,1,2: each decides initial weights, data order and split.
    #[arg(long, value_name = "SEED,..", value_delimiter = ',', default_value = SEEDS)]
    seeds: Vec<u64>,
    /// Micro-batches that a rank accumulates for the gradients whose errors are measured.
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = WINDOWS)]
    windows: Vec<usize>,
    /// A text file, or a folder of them; the Rust sources of this build if absent.
    #[arg(long, value_name = "PATH")]
    data: Option<String>,
    /// Where accumulation.md, .svg and .csv go, replacing others but for what people wrote around
    /// the page's results; the next free runs/NNNN if absent.
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
}

const STEPS: usize = 400;
const SEEDS: &str = "0,1,2";
/// Powers of two, so that with two ranks the mean is exact and sums alone are measured.
const WINDOWS: &str = "1,4,16,64,256,1024";
/// Evaluations of a run, about, beside the one before training.
const EVALUATIONS: usize = 20;
const TITLE: &str = "Gradient accumulation in bf16 and in f32";
const PAGE: &str = "accumulation.md";
const FILES: Files = Files { chart: "accumulation.svg", numbers: "accumulation.csv" };

impl Accumulation {
    /// Everything that can be refused is, before the training, which takes minutes.
    pub(super) fn run(&self) -> Result<(), CliError> {
        let configs: Vec<_> = self.seeds.iter().map(|seed| self.config(*seed)).collect();
        configs.iter().try_for_each(Config::validate)?;
        for window in &self.windows {
            let mut config = configs[0].clone();
            config.train.gradient_accumulation_steps = *window;
            config.validate()?;
        }
        let text = Corpus::load(&configs[0])?.description;
        let made = match &self.folder {
            Some(_) => None,
            None => Some(RunFolder::create(&configs[0])?),
        };
        let folder = self.folder.as_deref().or(made.as_ref().map(RunFolder::path));
        let done = self.fill(folder.expect("a folder is named or made"), &configs, &text);
        if let (Err(_), Some(made)) = (&done, &made) {
            made.remove_unless_trained();
        }
        match done {
            Err(CliError::Interrupted { .. }) => {
                Err(CliError::Interrupted { left: "no results were written".into() })
            }
            done => done,
        }
    }

    fn fill(&self, folder: &Path, configs: &[Config], text: &str) -> Result<(), CliError> {
        fs::create_dir_all(folder).map_err(CliError::path("create", folder))?;
        let page = Page::open(&folder.join(PAGE), TITLE)?;
        let begin = Instant::now();
        show(&format!("text     {text}\nresults  {}\n", folder.display()))?;
        let (interrupt, mut results) = (launch::interrupt()?, Results::default());
        for config in configs {
            let corpus = Corpus::load(config)?;
            let (config, folder) = (config.clone(), folder.into());
            let (resume, init, trace) = (None, None, None);
            let job = Job { config, folder, json: false, resume, init, trace, corpus };
            self.train(job, &interrupt, &mut results)?;
        }
        show(&format!("\n{}", report::words(&results)))?;
        let origin = Origin { command: self.command(), text, config: &configs[0] };
        write(&folder.join(FILES.chart), &report::chart(&results))?;
        write(&folder.join(FILES.numbers), &results.csv())?;
        page.write(&report::markdown(&results, &origin, &FILES))?;
        show(&format!("{} in {:.0} s", folder.display(), begin.elapsed().as_secs_f64()))
    }

    /// Trains every setting from one seed, and measures gradients before training and after it.
    fn train(
        &self,
        mut job: Job,
        interrupt: &Arc<AtomicBool>,
        results: &mut Results,
    ) -> Result<(), CliError> {
        let seed = job.config.train.seed;
        let initial = Probe { job: &job, masters: None, interrupt };
        results.errors.extend(initial.measure(&self.windows)?);
        for setting in Setting::ALL {
            job.config.precision = setting.precision();
            let (trained, masters) = train(job.clone(), setting, interrupt)?;
            if let Some(problem) = trained.problem {
                return Err(CliError::Run(format!("seed {seed}, {setting}: {problem}")));
            }
            results.runs.push(Run { seed, setting, evaluations: trained.evaluations });
            if setting == Setting::WideSums {
                let trained = Probe { job: &job, masters: Some(Arc::new(masters)), interrupt };
                results.errors.extend(trained.measure(&self.windows)?);
            }
        }
        Ok(())
    }

    /// Of a run, but for its precision. The model is small, for it is trained often.
    fn config(&self, seed: u64) -> Config {
        let mut config = Config {
            model: ModelConfig {
                hidden_size: 64,
                intermediate_size: 160,
                layers: 2,
                heads: 4,
                kv_heads: 2,
                context: 64,
                ..ModelConfig::default()
            },
            precision: Setting::WideSums.precision(),
            train: TrainConfig {
                steps: self.steps,
                micro_batch_size: 1,
                gradient_accumulation_steps: 64,
                eval_every: self.steps.div_ceil(EVALUATIONS),
                eval_batches: 512,
                seed,
                ..TrainConfig::default()
            },
            run: RunConfig { launch: Launch::Threads, ..RunConfig::default() },
            ..Config::default()
        };
        config.optimizer.lr = 4e-3;
        config.data.path.clone_from(&self.data);
        config
    }

    /// The command line that repeats this.
    fn command(&self) -> String {
        let seeds = self.seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let windows = self.windows.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        let flags = [
            ("--steps", (self.steps != STEPS).then(|| self.steps.to_string())),
            ("--seeds", (seeds != SEEDS).then_some(seeds)),
            ("--windows", (windows != WINDOWS).then_some(windows)),
            ("--data", self.data.clone()),
            ("--folder", self.folder.as_ref().map(|folder| folder.display().to_string())),
        ];
        let given =
            flags.into_iter().filter_map(|(flag, value)| Some(format!(" {flag} {}", value?)));
        format!("cargo run --release -- experiment accumulation{}", given.collect::<String>())
    }
}

/// Trains a job to its end. Returns its evaluations, and the master weights of every parameter.
fn train(
    job: Job,
    setting: Setting,
    interrupt: &Arc<AtomicBool>,
) -> Result<(Trained, Masters), CliError> {
    let TrainConfig { seed, steps, .. } = job.config.train;
    let entropy = bigram_entropy(&job.corpus.validation);
    let run = job.config.run.clone();
    launch::run_here(&run, interrupt, move |comm| {
        let is_shown = comm.rank() == Rank(0);
        let mut trainer = Trainer::new(&job, Backend::host(comm))?;
        let trained = rank::train(&job, &mut trainer, entropy, &mut |event| match event {
            Event::Evaluation(evaluation) if is_shown => {
                let (step, bits) = (evaluation.step, evaluation.bits_per_byte);
                let run = format!("seed {seed}, {setting:<16}");
                let line = format!("{run} step {step:>4}/{steps}: {bits:.4} bits per byte");
                writeln!(io::stdout(), "{line}").map_err(RankError::output)
            }
            _ => Ok(()),
        })?;
        Ok((trained, trainer.masters()?))
    })
}

fn show(text: &str) -> Result<(), CliError> {
    writeln!(io::stdout(), "{text}").map_err(CliError::output("the results"))
}

fn write(path: &Path, text: &str) -> Result<(), CliError> {
    fs::write(path, text).map_err(CliError::path("write", path))
}
