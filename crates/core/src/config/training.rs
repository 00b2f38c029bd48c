//! Sharding, the update rule, the learning rate, and the loop.

use serde::{Deserialize, Serialize};

use super::check;
use crate::{Bucketing, Bytes, ConfigError, Overlap, Stage};

/// What is sharded, and in which portions it travels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ZeroConfig {
    /// The ZeRO stage: 0, 1, 2 or 3.
    pub stage: Stage,
    /// At most so many bytes of model weights in a bucket; absent for one bucket a unit (a
    /// transformer block, the embedding).
    pub bucket_bytes_max: Option<usize>,
    /// Whether collectives run on a thread of their own, beside the model's arithmetic; absent for
    /// where there are more processors than ranks.
    pub overlap: Option<Overlap>,
}

/// The update rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OptimizerConfig {
    /// Which rule.
    pub kind: OptimizerKind,
    /// The learning rate that the schedule multiplies.
    pub lr: f64,
    /// Decoupled for AdamW and Lion, added to the gradient otherwise. Matrices decay, vectors do
    /// not.
    pub weight_decay: f64,
    /// Adam's averaging factors of the first and second moment; Lion's of its
    /// direction and average.
    pub betas: [f64; 2],
    /// Added to the denominator of Adam and Adagrad.
    pub eps: f64,
    /// SGD's momentum; 0 for none.
    pub momentum: f64,
    /// The largest global norm of a gradient; 0 for no clipping.
    pub clip_norm: f64,
}

/// The update rules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
    #[default]
    AdamW,
    /// Adam (Kingma and Ba, 2015), with L2 regularisation.
    Adam,
    /// Lion (Chen et al., 2023).
    Lion,
    /// Adagrad (Duchi, Hazan and Singer, 2011), with L2 regularisation.
    Adagrad,
    /// Stochastic gradient descent with momentum.
    Sgd,
}

/// The learning rate over the applied steps, as a factor of `optimizer.lr`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ScheduleConfig {
    /// How it falls after the warm-up.
    pub kind: DecayKind,
    /// Steps over which it first rises, linearly; absent: 20, or all of a shorter run.
    pub warmup_steps: Option<usize>,
    /// The factor at which the fall ends. The step after the last would have it, so that each of
    /// `train.steps` is a step of the fall (as in torch and transformers, whose schedules end
    /// there, too); a constant schedule ignores it.
    pub min_factor: f64,
}

/// How the learning rate falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecayKind {
    /// Not at all.
    Constant,
    /// In a straight line.
    Linear,
    /// In half a period of a cosine.
    #[default]
    Cosine,
}

/// Steps, batches and evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TrainConfig {
    /// Optimizer steps.
    pub steps: usize,
    /// Sequences that one rank runs forward and backward at a time.
    pub micro_batch_size: usize,
    /// Micro-batches that one rank accumulates before a step.
    pub gradient_accumulation_steps: usize,
    /// Whether backward runs forward again instead of keeping what forward calculated.
    pub recompute: Recompute,
    /// Steps between evaluations; 0 for one before and one after training only.
    pub eval_every: usize,
    /// Micro-batches of validation text that an evaluation reads.
    pub eval_batches: usize,
    /// Steps between checkpoints, of which the last step has one too; 0 for none.
    pub save_every: usize,
    /// How many checkpoints are kept; 0 for all.
    pub keep_last: usize,
    /// Seeds initial weights, the order of the data, the split and dropout.
    pub seed: u64,
}

/// Whether backward runs forward again (activation checkpointing).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// Where weights are sharded (stage 3), and nowhere else.
    #[default]
    Auto,
    /// In every stage.
    Always,
    /// In no stage.
    Never,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        Self { stage: Stage::Zero2, bucket_bytes_max: None, overlap: None }
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            kind: OptimizerKind::AdamW,
            lr: 2e-3,
            weight_decay: 0.1,
            betas: [0.9, 0.95],
            eps: 1e-8,
            momentum: 0.9,
            clip_norm: 1.0,
        }
    }
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self { kind: DecayKind::Cosine, warmup_steps: None, min_factor: 0.1 }
    }
}

impl Default for TrainConfig {
    fn default() -> Self {
        Self {
            steps: 300,
            micro_batch_size: 8,
            gradient_accumulation_steps: 1,
            recompute: Recompute::Auto,
            eval_every: 0,
            eval_batches: 16,
            save_every: 0,
            keep_last: 2,
            seed: 0,
        }
    }
}

impl ZeroConfig {
    /// How parameters fall into buckets.
    pub fn bucketing(&self) -> Bucketing {
        self.bucket_bytes_max.map_or(Bucketing::Unit, |max| Bucketing::Bytes(Bytes(max)))
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        match self.bucket_bytes_max {
            Some(max) => check::count("zero.bucket_bytes_max", max, 1..=check::COUNT_MAX),
            None => Ok(()),
        }
    }
}

impl OptimizerConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        check::positive("optimizer.lr", self.lr)?;
        check::not_negative("optimizer.weight_decay", self.weight_decay)?;
        let possible = self.betas.iter().all(|beta| check::is_below_one(*beta));
        let allowed = "two numbers, each 0 or more, and below 1 when rounded to f32";
        check::that(possible, "optimizer.betas", self.betas, allowed)?;
        check::positive("optimizer.eps", self.eps)?;
        check::below_one("optimizer.momentum", self.momentum)?;
        check::not_negative("optimizer.clip_norm", self.clip_norm)
    }
}

/// Steps of warm-up where nothing is asked for.
const WARMUP_STEPS: usize = 20;

impl ScheduleConfig {
    /// The steps of warm-up in a run of `steps`.
    pub fn warmup_in(&self, steps: usize) -> usize {
        self.warmup_steps.unwrap_or(WARMUP_STEPS.min(steps))
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let warmup_steps = self.warmup_steps.unwrap_or(0);
        check::count("schedule.warmup_steps", warmup_steps, 0..=check::COUNT_MAX)?;
        let possible = (0.0..=1.0).contains(&self.min_factor);
        check::that(possible, "schedule.min_factor", self.min_factor, "0 to 1")
    }
}

impl TrainConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        let window = self.gradient_accumulation_steps;
        check::count("train.steps", self.steps, 1..=check::COUNT_MAX)?;
        check::count("train.micro_batch_size", self.micro_batch_size, 1..=1 << 16)?;
        check::count("train.gradient_accumulation_steps", window, 1..=1 << 16)?;
        check::count("train.eval_every", self.eval_every, 0..=check::COUNT_MAX)?;
        check::count("train.eval_batches", self.eval_batches, 1..=1 << 16)?;
        check::count("train.save_every", self.save_every, 0..=check::COUNT_MAX)?;
        check::count("train.keep_last", self.keep_last, 0..=check::COUNT_MAX)?;
        let allowed = format!("0 to {}", i64::MAX);
        check::that(i64::try_from(self.seed).is_ok(), "train.seed", self.seed, &allowed)
    }
}
