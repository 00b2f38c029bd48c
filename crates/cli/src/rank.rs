//! One rank's training, from the first evaluation to the report.

use std::io;
use std::time::{Duration, Instant};

use oxizero::{EngineError, SkipReason, StepOutcome};
use oxizero_burn::BurnError;
use oxizero_comm::{CommError, Communicator};
use oxizero_core::Rank;
use oxizero_core::config::Launch;

use crate::data::bigram_entropy;
use crate::job::Job;
use crate::launch::threads_per_rank;
use crate::progress::{Evaluation, Event, Progress, Start, Step};
use crate::report::{Report, proportional_set_bytes, role_rows};
use crate::run_folder::{Metrics, save_model};
use crate::setup;
use crate::trainer::{Stepped, Trainer};

/// Why a rank ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RankError {
    /// The engine, or a collective.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A collective of the rank's own.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The model.
    #[error(transparent)]
    Model(#[from] BurnError),
    /// The run's output.
    #[error("cannot write the run's output: {0}")]
    Output(#[from] io::Error),
}

impl RankError {
    /// Whether another rank is to blame, and will say why.
    pub(crate) fn is_consequence(&self) -> bool {
        let comm = match self {
            Self::Engine(EngineError::PeerRefused { .. }) => return true,
            Self::Engine(EngineError::Comm(error)) | Self::Comm(error) => error,
            _ => return false,
        };
        matches!(comm, CommError::PeerDead { .. } | CommError::Aborted { .. })
    }
}

/// Trains `job` as one rank of `comm`; rank 0 shows and writes what happens.
pub(crate) fn run(job: &Job, comm: Box<dyn Communicator>) -> Result<(), RankError> {
    let mut output = Output::new(job, comm.rank())?;
    let mut trainer = Trainer::new(job, comm)?;
    let entropy = bigram_entropy(&job.corpus.validation);
    output.show(|| start(job, &trainer, entropy))?;
    let evaluate = |trainer: &mut Trainer<'_>, output: &mut Output, step| {
        let bits_per_byte = trainer.evaluate()?;
        let evaluation = Evaluation { step, bits_per_byte, bigram_entropy: entropy };
        output.show(|| Event::Evaluation(evaluation))?;
        Ok::<_, RankError>(bits_per_byte)
    };
    let train = &job.config.train;
    let before = evaluate(&mut trainer, &mut output, 0)?;
    let mut training = Duration::ZERO;
    for step in 0..train.steps {
        let begin = Instant::now();
        let stepped = trainer.step(step)?;
        let seconds = begin.elapsed();
        training += seconds;
        output.show(|| Event::Step(step_event(job, step, stepped, seconds)))?;
        let is_due = train.eval_every > 0 && (step + 1).is_multiple_of(train.eval_every);
        if is_due && step + 1 < train.steps {
            evaluate(&mut trainer, &mut output, step + 1)?;
        }
    }
    let after = evaluate(&mut trainer, &mut output, train.steps)?;
    let weights = trainer.weights()?;
    let sample = trainer.sample()?;
    if output.is_shown() {
        save_model(&job.folder, &weights)?;
    }
    let learned = Learned { before, after, entropy, training, sample };
    output.show(|| Event::End(Box::new(report(job, &trainer, learned))))
}

/// What the run says and writes; nothing on ranks but 0.
struct Output {
    shown: Option<(Progress, Metrics)>,
}

impl Output {
    fn new(job: &Job, rank: Rank) -> io::Result<Self> {
        if rank != Rank(0) {
            return Ok(Self { shown: None });
        }
        Ok(Self { shown: Some((Progress::new(job.json), Metrics::create(&job.folder)?)) })
    }

    fn is_shown(&self) -> bool {
        self.shown.is_some()
    }

    fn show(&mut self, event: impl FnOnce() -> Event) -> Result<(), RankError> {
        if let Some((progress, metrics)) = &mut self.shown {
            let event = event();
            metrics.add(&event)?;
            progress.show(&event)?;
        }
        Ok(())
    }
}

fn start(job: &Job, trainer: &Trainer<'_>, bigram_entropy: f64) -> Event {
    let config = &job.config;
    let parameters = trainer.numel().0;
    let model = format!(
        "{parameters} parameters, {} weights, computed in {}",
        config.precision.model,
        setup::compute(config)
    );
    let buckets = match config.zero.bucket_bytes_max {
        Some(max) => format!("buckets of at most {max} bytes"),
        None => "a bucket a unit".into(),
    };
    let ranks = match config.run.launch {
        Launch::Processes => "processes",
        Launch::Threads => "threads of one process",
    };
    let threads = match threads_per_rank(&config.run) {
        1 => "1 thread".into(),
        threads => format!("{threads} threads"),
    };
    let stage = u8::from(config.zero.stage);
    let ranks =
        format!("{} {ranks}, each on {threads}; ZeRO stage {stage}, {buckets}", config.run.ranks);
    let batch = format!(
        "{} ranks x {} micro-batches x {} sequences x {} tokens, {} steps",
        config.run.ranks,
        config.train.gradient_accumulation_steps,
        config.train.micro_batch_size,
        config.model.context,
        config.train.steps
    );
    Event::Start(Start {
        text: job.corpus.description.clone(),
        train_bytes: job.corpus.train.len(),
        validation_bytes: job.corpus.validation.len(),
        bigram_entropy,
        parameters,
        words: vec![("model", model), ("ranks", ranks), ("batch", batch)],
        folder: job.folder.display().to_string(),
    })
}

fn step_event(job: &Job, step: usize, stepped: Stepped, took: Duration) -> Step {
    let (grad_norm, outcome) = match stepped.outcome {
        StepOutcome::Applied { norm_before, .. } => (Some(norm_before), "applied".into()),
        StepOutcome::Skipped { reason, parameter, rank } => (None, {
            let reason = match reason {
                SkipReason::NonFinite => "not finite",
                _ => "refused",
            };
            format!("skipped: gradient of {parameter} {reason} on rank {rank}")
        }),
        StepOutcome::Accumulated { n, of } => (None, format!("accumulated {n} of {of}")),
    };
    Step {
        step: step + 1,
        of: job.config.train.steps,
        loss: stepped.loss,
        lr: stepped.lr,
        grad_norm,
        tokens_per_second: job.config.tokens_per_step() as f64 / took.as_secs_f64(),
        outcome,
    }
}

/// What training came to.
struct Learned {
    before: f64,
    after: f64,
    entropy: f64,
    training: Duration,
    sample: String,
}

fn report(job: &Job, trainer: &Trainer<'_>, learned: Learned) -> Report {
    let (config, engine) = (&job.config, trainer.engine());
    let (traffic, seconds) = (engine.step_traffic(), learned.training.as_secs_f64());
    let tokens = config.tokens_per_step() * config.train.steps;
    Report {
        stage: config.zero.stage.into(),
        ranks: config.run.ranks,
        memory: role_rows(engine.peak_memory(), trainer.data_parallel().peak),
        shares_replicas: engine.communicator().shares_replicas(),
        proportional_set_bytes: proportional_set_bytes(),
        tokens_per_second: tokens as f64 / seconds,
        training_seconds: seconds,
        collectives_per_step: traffic.collectives,
        bytes_per_step: traffic.bytes.0,
        bits_per_byte_before: learned.before,
        bits_per_byte_after: learned.after,
        bigram_entropy: learned.entropy,
        sample: learned.sample,
        folder: job.folder.display().to_string(),
    }
}
