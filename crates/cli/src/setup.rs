//! From a configuration to the engine's values.

use oxizero::chain::Recompute;
use oxizero::{EngineOptions, GroupOptions, OptimizerSetup};
use oxizero_burn::llama::Tokens;
use oxizero_burn::{BurnError, Model, cpu, transformer};
use oxizero_comm::Computes;
use oxizero_core::config::{self, Compute, DecayKind, OptimizerKind};
use oxizero_core::{Config, DType, Overlap, Placement, WorldSize};
use oxizero_optim::{
    Adagrad, AdagradOptions, Adam, AdamW, Decay, Lion, LionOptions, LrSchedule, MomentOptions,
    Momentum, OptimError, Optimizer, Sgd,
};

/// The transformer, on the CPU.
pub(crate) fn model(config: &Config) -> Result<Model<Tokens>, BurnError> {
    transformer::model(&config.model, config.precision.model, compute(config), &cpu())
}

/// The dtype of forward and backward.
pub(crate) fn compute(config: &Config) -> DType {
    match config.model.compute {
        // The CPU back end has no bf16 arithmetic that is faster than widening.
        Compute::Auto | Compute::F32 => DType::F32,
        Compute::Bf16 => DType::Bf16,
    }
}

/// How the engine shards, accumulates, clips.
pub(crate) fn engine_options(config: &Config) -> EngineOptions {
    let clip_norm = config.optimizer.clip_norm;
    EngineOptions {
        bucketing: config.zero.bucketing(),
        accumulation: config.train.gradient_accumulation_steps,
        clip_norm: (clip_norm > 0.0).then_some(clip_norm),
        ..EngineOptions::new(config.zero.stage, config.precision)
    }
}

/// Where collectives of the configuration's ranks run, which are all on this machine.
pub(crate) fn overlap(config: &Config) -> Overlap {
    let ranks_here = WorldSize::new(config.run.ranks).expect("a validated configuration has ranks");
    oxizero_comm::overlap(config.zero.overlap, Computes::Host { ranks_here })
}

/// The update rule. Group 0 is matrices, which decay; group 1 is vectors, which do not.
pub(crate) fn optimizer(config: &Config) -> Result<OptimizerSetup, OptimError> {
    let config::OptimizerConfig { kind, lr, weight_decay, betas, eps, momentum, .. } =
        config.optimizer;
    let [beta1, beta2] = betas;
    let moments = MomentOptions { beta1, beta2, eps };
    let rule: Box<dyn Optimizer> = match kind {
        OptimizerKind::AdamW => Box::new(AdamW::new(moments)?),
        OptimizerKind::Adam => Box::new(Adam::new(moments)?),
        OptimizerKind::Lion => Box::new(Lion::new(LionOptions { beta1, beta2 })?),
        OptimizerKind::Adagrad => {
            Box::new(Adagrad::new(AdagradOptions { eps, ..AdagradOptions::default() })?)
        }
        OptimizerKind::Sgd => Box::new(Sgd::new(Momentum::Classical(momentum))?),
    };
    let group = |weight_decay| GroupOptions { lr, weight_decay };
    let groups = vec![group(weight_decay), group(0.0)];
    Ok(OptimizerSetup { rule, groups, schedule: schedule(config)? })
}

fn schedule(config: &Config) -> Result<LrSchedule, OptimError> {
    let config::ScheduleConfig { kind, min_factor, .. } = config.schedule;
    let decay = match kind {
        DecayKind::Constant => Decay::Constant,
        DecayKind::Linear => Decay::Linear,
        DecayKind::Cosine => Decay::Cosine,
    };
    let steps = config.train.steps;
    let (warmup, steps) = (config.schedule.warmup_in(steps) as u64, steps as u64);
    match warmup < steps {
        true => LrSchedule::new(decay, warmup, steps, min_factor),
        false => Ok(LrSchedule::constant(warmup)), // training ends before it would fall
    }
}

/// Whether backward runs forward again.
pub(crate) fn recompute(config: &Config) -> Recompute {
    match config.train.recompute {
        config::Recompute::Always => Recompute::Always,
        config::Recompute::Never => Recompute::Never,
        config::Recompute::Auto => match config.zero.stage.model() {
            Placement::Sharded => Recompute::Always,
            Placement::Replicated | Placement::Partial => Recompute::Never,
        },
    }
}
