//! One rank's training, from the first evaluation to the report.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use oxizero::{Backend, EngineError, Hop, Observer, Overlap, SkipReason, StepOutcome, Trace};
use oxizero_burn::BurnError;
use oxizero_comm::{Beside, CommError, Communicator, overlapped};
use oxizero_core::config::{Launch, TrainConfig};
use oxizero_core::{Rank, counted};

use crate::data::{Tokenized, bigram_entropy};
use crate::job::Job;
use crate::launch::{Blame, threads_per_rank};
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
    /// Who read standard output does not any more.
    #[error("nobody reads the output")]
    Closed,
    /// The user asked it to end, and it did, with a checkpoint.
    #[error("interrupted")]
    Interrupted,
    /// Training came to its end, and to nothing.
    #[error("training failed: {0}")]
    Fruitless(String),
    /// A bench computed something else than it must.
    #[error("{0}")]
    Contents(String),
    /// A bench took more memory than it may.
    #[error("{0}")]
    OverBound(String),
}

impl RankError {
    /// For `map_err` on writing to standard output.
    pub(crate) fn output(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Output(error),
        }
    }

    /// Who is to blame.
    pub(crate) fn blame(&self) -> Blame {
        match self {
            Self::Engine(EngineError::PeerRefused { .. }) => Blame::Other,
            Self::Engine(EngineError::Comm(error)) | Self::Comm(error) => Blame::of_comm(error),
            Self::Closed => Blame::Reader,
            Self::Interrupted => Blame::Nobody,
            Self::Fruitless(_) | Self::OverBound(_) => Blame::All,
            _ => Blame::Own,
        }
    }
}

/// Trains `job` as one rank of `comm`; rank 0 shows and writes what happens. Once any rank is
/// `asked` to, all end with a checkpoint after the step that they are in.
pub(crate) fn run(
    job: &Job,
    comm: Box<dyn Communicator>,
    asked: &Arc<AtomicBool>,
) -> Result<(), RankError> {
    let mut output = Output::new(job, comm.rank())?;
    let trace = job.trace.as_ref().map(|path| Trace::create(path, comm.rank(), comm.world_size()));
    let trace = trace.transpose()?.map(Arc::new);
    let mut trainer = Trainer::new(job, backend(job, comm, trace.clone())?)?;
    trainer.hear(asked);
    let entropy = bigram_entropy(&job.corpus.validation);
    output.show(|| start(job, &trainer, entropy))?;
    let trained = train(job, &mut trainer, entropy, &mut |event| output.show(|| event));
    if let (Err(RankError::Interrupted), Some(trace)) = (&trained, &trace) {
        trace.finish()?;
    }
    let trained = trained?;
    let mut sample = None;
    if trained.after().bits_per_byte.is_finite() {
        let weights = trainer.weights()?;
        let tokens = trainer.sample()?;
        if output.is_shown() {
            sample = Some(job.corpus.text_of(&tokens).map_err(io::Error::other)?);
            save_model(&job.folder, &weights)?;
        }
    }
    if let Some(trace) = trace {
        trace.finish()?;
    }
    let problem = trained.problem.clone();
    output.show(|| Event::End(Box::new(report(job, &trainer, trained, sample))))?;
    problem.map_or(Ok(()), |problem| Err(RankError::Fruitless(problem)))
}

/// What the engine runs on.
fn backend(
    job: &Job,
    comm: Box<dyn Communicator>,
    trace: Option<Arc<Trace>>,
) -> Result<Backend, CommError> {
    let communicator = match setup::overlap(&job.config) {
        Overlap::Off => comm,
        // Ctrl-C is the command's.
        Overlap::On => overlapped(comm, Beside::default())?,
    };
    let observer = trace.map(|trace| trace as Arc<dyn Observer>);
    Ok(Backend { observer, ..Backend::host(communicator) })
}

/// What training came to.
#[derive(Debug)]
pub(crate) struct Trained {
    /// In order: before training, as often as was asked for, and after it.
    pub(crate) evaluations: Vec<Evaluation>,
    /// Why training is a failure though it came to its end: the same on all ranks.
    pub(crate) problem: Option<String>,
    /// Without evaluations.
    training: Duration,
}

impl Trained {
    /// Before training.
    fn before(&self) -> Evaluation {
        *self.evaluations.first().expect("training begins with one")
    }

    /// After training.
    fn after(&self) -> Evaluation {
        *self.evaluations.last().expect("training ends with one")
    }
}

/// Where a rank's events go.
type Show<'a> = dyn FnMut(Event) -> Result<(), RankError> + 'a;

/// Takes all steps of `job`, with evaluations before, between and after them; hands each to `show`
/// as it ends, on every rank.
pub(crate) fn train(
    job: &Job,
    trainer: &mut Trainer<'_>,
    bigram_entropy: f64,
    show: &mut Show<'_>,
) -> Result<Trained, RankError> {
    let TrainConfig { steps, eval_every, .. } = job.config.train;
    let is_due = |step: usize| step == steps || eval_every > 0 && step.is_multiple_of(eval_every);
    let save_every = job.config.train.save_every;
    let saves = |step: usize| save_every > 0 && (step == steps || step.is_multiple_of(save_every));
    let first = trainer.first_step();
    let mut evaluations = vec![evaluate(trainer, first, bigram_entropy, show)?];
    let (mut training, mut skipped) = (Duration::ZERO, 0);
    for step in first..steps {
        let begin = Instant::now();
        let stepped = trainer.step(step)?;
        let seconds = begin.elapsed();
        training += seconds;
        let is_asked = stepped.is_asked;
        let is_skipped = matches!(stepped.outcome, StepOutcome::Skipped { .. });
        skipped = if is_skipped { skipped + 1 } else { 0 };
        show(Event::Step(step_event(job, step, stepped, seconds)))?;
        if is_asked && step + 1 < steps {
            trainer.save(step + 1)?;
            trainer.finish_save()?;
            return Err(RankError::Interrupted);
        }
        if is_due(step + 1) {
            evaluations.push(evaluate(trainer, step + 1, bigram_entropy, show)?);
        }
        if saves(step + 1) {
            trainer.save(step + 1)?;
        }
    }
    trainer.finish_save()?;
    let mut trained = Trained { evaluations, problem: None, training };
    trained.problem = problem(trained.after().bits_per_byte, skipped, steps);
    Ok(trained)
}

fn evaluate(
    trainer: &mut Trainer<'_>,
    step: usize,
    bigram_entropy: f64,
    show: &mut Show<'_>,
) -> Result<Evaluation, RankError> {
    let evaluation = Evaluation { step, bits_per_byte: trainer.evaluate()?, bigram_entropy };
    show(Event::Evaluation(evaluation))?;
    Ok(evaluation)
}

/// So many steps that were skipped at the end of a run are not chance.
const SKIPPED_MAX: usize = 10;

/// What makes a run that came to its end a failure: the same on all ranks.
fn problem(after: f64, skipped: usize, steps: usize) -> Option<String> {
    if !after.is_finite() {
        return Some(format!(
            "the validation loss is {after} after training, and no model is saved; a smaller \
             optimizer.lr or weight_decay may help"
        ));
    }
    (skipped >= SKIPPED_MAX.min(steps)).then(|| {
        format!(
            "the last {skipped} of {steps} steps were skipped, as gradients were not finite; the \
             saved model is that of the last step that was applied"
        )
    })
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
            progress.show(&event).map_err(RankError::output)?;
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
        Launch::Processes => counted(config.run.ranks, "process"),
        Launch::Threads => format!("{} of one process", counted(config.run.ranks, "thread")),
    };
    let threads = counted(threads_per_rank(&config.run), "thread");
    let stage = u8::from(config.zero.stage);
    let ranks = format!("{ranks}, each on {threads}; ZeRO stage {stage}, {buckets}");
    let batch = format!(
        "{} x {} x {} x {}, {}",
        counted(config.run.ranks, "rank"),
        counted(config.train.gradient_accumulation_steps, "micro-batch"),
        counted(config.train.micro_batch_size, "sequence"),
        counted(config.model.context, "token"),
        counted(config.train.steps, "step")
    );
    let mut words = vec![("model", model), ("ranks", ranks), ("batch", batch)];
    if let Some(Tokenized { tokenizer, train, validation }) = &job.corpus.tokenized {
        let (train, validation) = (train.len(), validation.len());
        let (path, hash) = (&tokenizer.path, &tokenizer.sha256);
        let tokens = format!("{train} to train on, {validation} to validate on");
        words.insert(0, ("tokens", format!("{tokens}, by `{path}`, sha256 {hash}")));
    }
    for path in trainer.engine().gradient_paths() {
        let changed = path.hops.iter().filter_map(|hop| Some((hop, hop.why?)));
        let told = changed.map(|(Hop { place, dtype, asked, .. }, why)| {
            ("dtype", format!("gradients {place}: {dtype}, not {asked}, for {why}"))
        });
        words.extend(told);
    }
    Event::Start(Start {
        text: job.corpus.description.clone(),
        train_bytes: job.corpus.train.len(),
        validation_bytes: job.corpus.validation.len(),
        bigram_entropy,
        parameters,
        words,
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

fn report(job: &Job, trainer: &Trainer<'_>, trained: Trained, sample: Option<String>) -> Report {
    let (config, engine) = (&job.config, trainer.engine());
    let (traffic, seconds) = (engine.step_traffic(), trained.training.as_secs_f64());
    let tokens = config.tokens_per_step() * config.train.steps;
    let (before, after) = (trained.before(), trained.after());
    Report {
        stage: config.zero.stage.into(),
        ranks: config.run.ranks,
        memory: role_rows(engine.fullest_memory(), trainer.data_parallel().fullest),
        shares_replicas: engine.communicator().shares_replicas(),
        proportional_set_bytes: proportional_set_bytes(),
        tokens_per_second: tokens as f64 / seconds,
        training_seconds: seconds,
        collectives_per_step: traffic.collectives,
        bytes_per_step: traffic.bytes.0,
        bits_per_byte_before: before.bits_per_byte,
        bits_per_byte_after: after.bits_per_byte,
        bigram_entropy: after.bigram_entropy,
        problem: trained.problem,
        sample,
        folder: job.folder.display().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_fails_by_its_end_and_not_by_a_step_that_was_skipped_before() {
        assert_eq!(problem(2.0, 9, 100), None);
        assert!(problem(2.0, 10, 100).unwrap().contains("last 10 of 100 steps"));
        assert!(problem(2.0, 3, 3).unwrap().contains("last 3 of 3 steps"));
        assert_eq!(problem(2.0, 2, 3), None);
        assert!(problem(f64::NAN, 0, 3).unwrap().contains("NaN"));
    }
}
