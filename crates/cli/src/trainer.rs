//! What one rank calculates: steps, evaluations, and at the end weights and a sample of text.
//!
//! Every method but the plain readers is a collective call: all ranks make the same calls in the
//! same order.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use oxizero::chain::{Chain, Recompute};
use oxizero::{
    Backend, Engine, LoadOptions, RunFolder, Sampler, SaveOptions, Scope, StepOutcome, step_name,
};
use oxizero_burn::llama::{Sampling, Tokens, generate};
use oxizero_burn::transformer::init_param;
use oxizero_burn::{Block, cpu, scalar};
use oxizero_checkpoint::WeightFiles;
use oxizero_core::config::TrainConfig;
use oxizero_core::{MemoryPlan, Numel, ParamId, Random, Rank};
use oxizero_device::{View, ViewMut, kernels};
use serde_json::json;

use crate::checkpoints;
use crate::data::{Batches, bits_per_byte, evaluation_batches};
use crate::initial;
use crate::job::Job;
use crate::plan::Plan;
use crate::rank::RankError;
use crate::run_folder;
use crate::setup;

/// The purposes of random draws.
const DROPOUT: u64 = u64::from_be_bytes(*b"dropout ");
const INITIAL: u64 = u64::from_be_bytes(*b"initial ");
const SAMPLE: u64 = u64::from_be_bytes(*b"sample  ");

/// Tokens of validation text that a sample starts with, and tokens that the model adds.
const PROMPT: usize = 48;
const ADDED: usize = 200;
const TEMPERATURE: f32 = 0.7;

/// One rank's model and data.
pub(crate) struct Trainer<'a> {
    job: &'a Job,
    chain: Chain<Block<Tokens>>,
    engine: Engine,
    recompute: Recompute,
    sampler: Sampler,
    batches: Batches<'a>,
    evaluation: Vec<Vec<Vec<u32>>>,
    data_parallel: MemoryPlan,
    numel: Numel,
    /// The step that the run begins with.
    first_step: usize,
    /// Whether the user wants the run to end.
    asked: Arc<AtomicBool>,
}

/// One optimizer step.
pub(crate) struct Stepped {
    /// The mean over all ranks' micro-batches, in nats per token.
    pub(crate) loss: f64,
    /// The learning rate of the step.
    pub(crate) lr: f64,
    /// What the engine did.
    pub(crate) outcome: StepOutcome,
    /// Whether the run is to end, as any rank heard before the step did; the same on all.
    pub(crate) is_asked: bool,
}

impl<'a> Trainer<'a> {
    /// Makes the model, with rank 0's initial weights on all ranks, or those of the checkpoint that
    /// the job goes on from.
    pub(crate) fn new(job: &'a Job, backend: Backend) -> Result<Self, RankError> {
        let mut trainer = Self::initial(job, backend)?;
        trainer.resume()?;
        Ok(trainer)
    }

    fn initial(job: &'a Job, backend: Backend) -> Result<Self, RankError> {
        let config = &job.config;
        let (model, optimizer) = (setup::model(config)?, setup::optimizer(config));
        let optimizer = optimizer.map_err(oxizero::EngineError::from)?;
        let state_count = optimizer.rule.state_names().len();
        let plan = Plan { config, model: &model, state_count };
        let (data_parallel, numel) = (plan.data_parallel(), plan.numel());
        let context = config.model.context;
        let (specs, chain) = model.into_chain();
        let seed = Random::for_path(config.train.seed, &[INITIAL]).next_u64();
        let files = job.init.as_deref().map(WeightFiles::open).transpose();
        let files = files.map_err(oxizero::EngineError::from)?;
        let (told, mut unread) = (specs.clone(), Ok(()));
        let mut initial = |param: ParamId, weights: ViewMut<'_>| {
            let (spec, ViewMut::F32(values)) = (&told[param.0], weights) else {
                unreachable!("the host's initial weights are f32");
            };
            match &files {
                None => init_param(&config.model, &spec.name, seed, values),
                Some(_) if unread.is_err() => {}
                Some(files) => unread = initial::read(files, spec, values),
            }
        };
        let world_size = backend.communicator.world_size();
        let (order, options) = (chain.order(), setup::engine_options(config));
        let engine = Engine::on_backend(specs, order, options, optimizer, backend, &mut initial)?;
        unread.map_err(oxizero::EngineError::from)?;
        let train = &config.train;
        let micro_batch_size = train.micro_batch_size;
        Ok(Self {
            job,
            chain,
            engine,
            recompute: setup::recompute(config),
            sampler: Sampler {
                world_size,
                accumulation: train.gradient_accumulation_steps,
                stage: config.zero.stage,
            },
            batches: Batches {
                text: job.corpus.train_text(),
                context,
                micro_batch_size,
                seed: train.seed,
            },
            evaluation: evaluation_batches(
                job.corpus.validation_text(),
                context,
                micro_batch_size,
                train.eval_batches,
            ),
            data_parallel,
            numel,
            first_step: 0,
            asked: Arc::default(),
        })
    }

    fn resume(&mut self) -> Result<(), RankError> {
        let Some(folder) = &self.job.resume else { return Ok(()) };
        let (parent, name) = (folder.parent(), folder.file_name().and_then(OsStr::to_str));
        let run = RunFolder::new(parent.unwrap_or(Path::new(".")));
        let loaded = self.engine.load(&run, name, LoadOptions::default())?;
        let step = loaded.checkpoint.manifest().caller["step"].as_u64();
        self.first_step = step.unwrap_or(self.engine.applied_steps()) as usize;
        Ok(())
    }

    /// The step that the run begins with, counted from 0.
    pub(crate) fn first_step(&self) -> usize {
        self.first_step
    }

    /// Looks at the end of each step whether the run is to end.
    pub(crate) fn hear(&mut self, asked: &Arc<AtomicBool>) {
        self.asked = Arc::clone(asked);
    }

    /// Saves a checkpoint after so many steps, while training goes on.
    pub(crate) fn save(&mut self, steps: usize) -> Result<(), RankError> {
        let TrainConfig { keep_last, .. } = self.job.config.train;
        let options = SaveOptions {
            name: Some(step_name(steps as u64)),
            keep_last: (keep_last > 0).then_some(keep_last),
            caller: self.caller(steps),
            ..SaveOptions::default()
        };
        self.engine.save_in_background(&checkpoints::of_run(&self.job.folder), &options)?;
        Ok(())
    }

    /// What a checkpoint says beside the engine's state: enough to go on, and to refuse to.
    fn caller(&self, steps: usize) -> serde_json::Value {
        let tokenizer = self.job.corpus.tokenized.as_ref().map(|tokenized| {
            let file = &tokenized.tokenizer;
            json!({"path": file.path, "sha256": file.sha256})
        });
        json!({"step": steps, "config": self.job.config.to_toml(), "tokenizer": tokenizer})
    }

    /// Waits until the last checkpoint is on the disk.
    pub(crate) fn finish_save(&mut self) -> Result<(), RankError> {
        self.engine.finish_save()?;
        Ok(())
    }

    /// The engine, for its statistics.
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// What a rank would hold in plain data parallelism.
    pub(crate) fn data_parallel(&self) -> MemoryPlan {
        self.data_parallel
    }

    /// Elements of the model.
    pub(crate) fn numel(&self) -> Numel {
        self.numel
    }

    /// Runs the micro-batches of optimizer step `step`, counted from 0.
    pub(crate) fn step(&mut self, step: usize) -> Result<Stepped, RankError> {
        let accumulation = self.sampler.accumulation;
        let lr = self.engine.lr(0).expect("there is a group of matrices");
        let (mut loss, mut outcome) = (0.0, StepOutcome::Accumulated { n: 0, of: accumulation });
        for micro_batch in 0..accumulation {
            loss += self.run_micro_batch(step, micro_batch)?;
            outcome = self.engine.step()?;
        }
        let asked = f64::from(u8::from(self.asked.load(Relaxed)));
        let ranks = self.exchange("the loss", &[loss, asked])?;
        let micro_batches = ranks.len() * accumulation;
        let loss = ranks.iter().map(|told| told[0]).sum::<f64>() / micro_batches as f64;
        let is_asked = ranks.iter().any(|told| told[1] > 0.0);
        Ok(Stepped { loss, lr, outcome, is_asked })
    }

    /// The whole gradients that optimizer step `step` would apply, before clipping, by parameter.
    /// The step is not taken, and no other can be after it.
    pub(crate) fn grads(mut self, step: usize) -> Result<Vec<Vec<f32>>, RankError> {
        for micro_batch in 0..self.sampler.accumulation {
            if micro_batch > 0 {
                self.engine.step()?;
            }
            self.run_micro_batch(step, micro_batch)?;
        }
        Ok(self.engine.full_grads(Scope::Global)?.iter().map(|(_, grad)| widened(grad)).collect())
    }

    /// The f32 master weights, by parameter.
    pub(crate) fn masters(&mut self) -> Result<Vec<Vec<f32>>, RankError> {
        let mut masters = Vec::new();
        for param in (0..self.engine.params().len()).map(ParamId) {
            let master = self.engine.full_param(param)?;
            masters.extend(master.map(|master| widened(master.view())));
        }
        Ok(masters)
    }

    /// Replaces the master weights of every parameter, and with them the model weights.
    pub(crate) fn set_masters(&mut self, masters: &[Vec<f32>]) -> Result<(), RankError> {
        for (param, master) in masters.iter().enumerate() {
            self.engine.set_full_param(ParamId(param), View::F32(master))?;
        }
        Ok(())
    }

    /// Runs one of this rank's micro-batches forward and backward; returns its loss.
    fn run_micro_batch(&mut self, step: usize, micro_batch: usize) -> Result<f64, RankError> {
        let rank = self.engine.communicator().rank();
        let index = self.sampler.global_micro_batch(step, rank, micro_batch);
        let tokens = Tokens::of_numbers(&self.batches.draw(index), &cpu());
        let dropout = Random::for_path(self.batches.seed, &[DROPOUT, index]).next_u64();
        let loss = self.chain.train(&mut self.engine, &tokens, self.recompute, dropout)?;
        Ok(f64::from(scalar(loss)))
    }

    /// Bits per byte of the evaluation's share of the validation text, the same whatever the
    /// number of ranks: each takes some of the batches, and the sum is in their order.
    pub(crate) fn evaluate(&mut self) -> Result<f64, RankError> {
        let comm = self.engine.communicator();
        let (ranks, rank) = (comm.world_size().get(), comm.rank().0);
        let count = self.evaluation.len();
        let mut nats = Vec::new();
        for first in (0..count).step_by(ranks) {
            // A rank for which no batch is left repeats the last, for all must gather weights.
            let batch = &self.evaluation[(first + rank).min(count - 1)];
            let loss = self.chain.evaluate(&mut self.engine, &Tokens::of_numbers(batch, &cpu()))?;
            nats.push(f64::from(scalar(loss)) * batch.len() as f64);
        }
        let all = self.exchange("the evaluation", &nats)?;
        let in_order = (0..count).map(|index| all[index % ranks][index / ranks]);
        let sequences: usize = self.evaluation.iter().map(Vec::len).sum();
        let nats_per_token = in_order.sum::<f64>() / sequences as f64;
        // Over the whole validation text, of which the evaluation's share is a sample.
        let corpus = &self.job.corpus;
        let (tokens, bytes) = (corpus.validation_text().len(), corpus.validation.len());
        Ok(bits_per_byte(nats_per_token * (tokens as f64 / bytes as f64)))
    }

    /// The whole weights, on rank 0; nothing on the others.
    pub(crate) fn weights(&mut self) -> Result<Vec<run_folder::Tensor>, RankError> {
        let is_kept = self.engine.communicator().rank() == Rank(0);
        let mut tensors: Vec<run_folder::Tensor> = Vec::new();
        let mut seen = Vec::new();
        for unit in self.chain.order() {
            self.engine.pre_forward(unit)?;
            if is_kept && !seen.contains(&unit) {
                let weights = self.engine.unit_weights(unit)?;
                let specs = self.engine.params();
                tensors.extend(weights.params.iter().map(|weight| run_folder::Tensor {
                    name: specs[weight.param.0].name.clone(),
                    dtype: weight.dtype(),
                    shape: weight.shape.clone(),
                    bytes: weight.bucket.region().bytes()[weight.bytes()].to_vec(),
                }));
                seen.push(unit);
            }
            self.engine.post_forward(unit)?;
        }
        Ok(tensors)
    }

    /// The beginning of the validation text as the model goes on with it, as tokens.
    pub(crate) fn sample(&mut self) -> Result<Vec<usize>, RankError> {
        let config = &self.job.config;
        let text = self.job.corpus.validation_text();
        let prompt = text.sequence(0, PROMPT.min(config.model.context));
        let mut tokens: Vec<usize> = prompt.iter().map(|token| *token as usize).collect();
        let seed = Random::for_path(config.train.seed, &[SAMPLE]).next_u64();
        let sampling = Sampling { temperature: TEMPERATURE, seed };
        let (chain, engine, device) = (&self.chain, &mut self.engine, cpu());
        let logits = |tokens: &Tokens| chain.evaluate(engine, tokens);
        generate(&mut tokens, ADDED, config.model.context, sampling, &device, logits)?;
        Ok(tokens)
    }

    /// Every rank's numbers; all give equally many.
    fn exchange(&self, label: &str, numbers: &[f64]) -> Result<Vec<Vec<f64>>, RankError> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.engine.communicator().exchange(label, &bytes)?;
        let number =
            |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("a chunk of eight bytes"));
        Ok(all.iter().map(|bytes| bytes.chunks_exact(8).map(number).collect()).collect())
    }
}

fn widened(values: View<'_>) -> Vec<f32> {
    let mut widened = vec![0.0; values.numel().0];
    kernels::cast(values, ViewMut::F32(&mut widened));
    widened
}
