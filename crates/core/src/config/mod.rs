//! The whole configuration of a run: one tree, read from and written as TOML.
//!
//! Every field has a default, so that an empty text is a configuration: the one of the README's
//! first command. Parsing refuses unknown names and wrong types, [`Config::validate`] refuses
//! values; every error names the field, its value, and what is allowed. Reads no files.

mod check;
mod hub;
mod model;
mod parse;
mod run;
mod training;

use serde::{Deserialize, Serialize};

pub use model::{Compute, ModelConfig, ModelKind};
pub use run::{DataConfig, Launch, RunConfig};
pub use training::{
    DecayKind, OptimizerConfig, OptimizerKind, Recompute, ScheduleConfig, TrainConfig, ZeroConfig,
};

use crate::{ConfigError, DType, GlobalBatch, Precision};

/// What to train, on what, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The transformer.
    pub model: ModelConfig,
    /// The dtypes of weights and gradients. Fields that are absent follow `model`, as
    /// [`Precision::of_model`] has it.
    #[serde(deserialize_with = "parse::precision")]
    pub precision: Precision,
    /// What is sharded, and in which portions.
    pub zero: ZeroConfig,
    /// The update rule.
    pub optimizer: OptimizerConfig,
    /// The learning rate over the steps.
    pub schedule: ScheduleConfig,
    /// Steps, batches and evaluation.
    pub train: TrainConfig,
    /// The text.
    pub data: DataConfig,
    /// Ranks, and where results go.
    pub run: RunConfig,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            model: ModelConfig::default(),
            precision: Precision::of_model(DType::Bf16),
            zero: ZeroConfig::default(),
            optimizer: OptimizerConfig::default(),
            schedule: ScheduleConfig::default(),
            train: TrainConfig::default(),
            data: DataConfig::default(),
            run: RunConfig::default(),
        }
    }
}

impl Config {
    /// Reads a configuration; absent fields take their defaults. Values are not judged yet: call
    /// [`validate`](Self::validate) when overrides are in.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Syntax`] if `text` is no TOML, [`ConfigError::UnknownField`] for a name that
    /// does not exist, [`ConfigError::Value`] for a value of another type.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        parse::from_toml(text)
    }

    /// The configuration in full; only optional fields that are not set are absent.
    ///
    /// # Panics
    ///
    /// If a count is larger than TOML's largest integer (2^63 - 1), which `validate` refuses.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("a validated configuration is within TOML's integers")
    }

    /// Refuses values out of range, and fields that do not work together; the first of them only.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.model.validate()?;
        if self.data.tokenizer.is_none() {
            check::count("model.vocab_size", self.model.vocab_size, 256..=check::SIZE_MAX)?;
        }
        self.precision.validate()?;
        self.zero.validate()?;
        self.optimizer.validate()?;
        self.schedule.validate()?;
        self.train.validate()?;
        self.data.validate()?;
        self.run.validate()?;
        let warmup_steps = self.schedule.warmup_in(self.train.steps);
        if warmup_steps > self.train.steps {
            return Err(ConfigError::Conflict {
                first: format!("schedule.warmup_steps = {warmup_steps}"),
                second: format!("train.steps = {}", self.train.steps),
                advice: format!("a warm-up takes at most all steps, {}", self.train.steps),
            });
        }
        if self.zero.stage.model() == crate::Placement::Sharded
            && self.train.recompute == Recompute::Never
        {
            return Err(ConfigError::Conflict {
                first: format!("zero.stage = {}", u8::from(self.zero.stage)),
                second: "train.recompute = never".into(),
                advice: "a tape would hold every unit's full weights; use auto or always".into(),
            });
        }
        Ok(())
    }

    /// The sequences that all ranks train on in one optimizer step.
    pub fn global_batch(&self) -> GlobalBatch {
        let micro_batch = self.train.micro_batch_size;
        let micro_batches = self.train.gradient_accumulation_steps * self.run.ranks;
        GlobalBatch { samples: micro_batch * micro_batches, micro_batch }
    }

    /// Tokens that all ranks train on in one optimizer step.
    pub fn tokens_per_step(&self) -> usize {
        self.global_batch().samples * self.model.context
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Stage;

    /// Every field differs from its default.
    const FULL: &str = r#"
[model]
kind = "gpt2"
vocab_size = 512
hidden_size = 96
intermediate_size = 250
layers = 3
heads = 12
kv_heads = 12
context = 77
positions = 80
rope_theta = 500000.0
norm_eps = 1e-6
tied = false
dropout = 0.25
compute = "bf16"

[precision]
model = "f32"
reduce = "f16"
accumulate = "f16"
master = "f32"

[zero]
stage = 3
bucket_bytes_max = 4096
overlap = true

[optimizer]
kind = "sgd"
lr = 0.5
weight_decay = 0.0
betas = [0.5, 0.75]
eps = 1e-5
momentum = 0.5
clip_norm = 0.0

[schedule]
kind = "linear"
warmup_steps = 3
min_factor = 0.5

[train]
steps = 9
micro_batch_size = 5
gradient_accumulation_steps = 7
recompute = "always"
eval_every = 6
save_every = 7
keep_last = 5
eval_batches = 3
seed = 8

[data]
path = "book.txt"
tokenizer = "tokenizer.json"
validation_fraction = 0.5

[run]
folder = "out"
ranks = 3
launch = "threads"
threads_per_rank = 5
deadline_seconds = 11.5
"#;

    fn leaves(value: &serde_json::Value) -> Vec<&serde_json::Value> {
        match value.as_object() {
            Some(table) => table.values().flat_map(leaves).collect(),
            None => vec![value],
        }
    }

    #[test]
    fn every_field_round_trips() {
        let config = Config::from_toml(FULL).unwrap();
        config.validate().unwrap();
        let json = |config: &Config| serde_json::to_value(config).unwrap();
        let (default, full) = (json(&Config::default()), json(&config));
        let differing = leaves(&default).into_iter().zip(leaves(&full)).filter(|(a, b)| a != b);
        // A master weight can only be f32.
        assert_eq!(differing.count(), leaves(&default).len() - 1);
        assert_eq!(Config::from_toml(&config.to_toml()), Ok(config));
    }

    #[test]
    fn an_empty_text_is_the_default_and_valid() {
        let config = Config::from_toml("").unwrap();
        assert_eq!(config, Config::default());
        config.validate().unwrap();
        assert_eq!(Config::from_toml(&config.to_toml()), Ok(config));
    }

    #[test]
    fn precision_follows_the_model_dtype() {
        let config = Config::from_toml("[precision]\nmodel = \"f32\"").unwrap();
        assert_eq!(config.precision, Precision::of_model(DType::F32));
        let config = Config::from_toml("[precision]\nreduce = \"f32\"").unwrap();
        let wide = Precision { reduce: DType::F32, ..Precision::of_model(DType::Bf16) };
        assert_eq!(config.precision, wide);
    }

    #[test]
    fn each_value_out_of_range_is_one_error_that_names_the_field() {
        let too_large = format!("train.steps = {}", 1_u64 << 62);
        let bad = [
            "model.vocab_size = 255",
            "model.hidden_size = 0",
            "model.intermediate_size = 0",
            "model.layers = 0",
            "model.heads = 0",
            "model.kv_heads = 0",
            "model.context = 0",
            "model.rope_theta = 0.0",
            "model.rope_theta = 1e308",
            "model.norm_eps = -1e-5",
            "model.norm_eps = 1e-60",
            "model.dropout = 1.0",
            "model.dropout = -0.1",
            "model.dropout = nan",
            "precision.master = 'bf16'",
            "zero.bucket_bytes_max = 0",
            "optimizer.lr = 0.0",
            "optimizer.lr = -1.0",
            "optimizer.lr = inf",
            "optimizer.lr = 1e39",
            "optimizer.lr = 1e-300",
            "optimizer.weight_decay = -0.1",
            "optimizer.weight_decay = 1e300",
            "optimizer.betas = [0.9, 1.0]",
            "optimizer.betas = [0.9, 0.999999999]",
            "optimizer.eps = 0.0",
            "optimizer.eps = 1e-40",
            "optimizer.momentum = 1.0",
            "optimizer.momentum = 0.999999999",
            "optimizer.clip_norm = -1.0",
            "optimizer.clip_norm = 1e39",
            "schedule.min_factor = 1.5",
            "train.steps = 0",
            &too_large,
            "train.micro_batch_size = 0",
            "train.gradient_accumulation_steps = 0",
            "train.eval_batches = 0",
            "data.path = ''",
            "data.tokenizer = ''",
            "data.validation_fraction = 0.0",
            "data.validation_fraction = 1.0",
            "run.folder = ''",
            "run.ranks = 0",
            "run.ranks = 65",
            "run.threads_per_rank = 0",
            "run.deadline_seconds = 0.0",
        ];
        for line in bad {
            let error = Config::from_toml(line).unwrap().validate().unwrap_err();
            let field = line.split(' ').next().unwrap();
            let ConfigError::Value { field: named, allowed, .. } = &error else {
                panic!("{line}: {error}");
            };
            assert_eq!(named, field);
            assert!(error.to_string().len() < 160, "{error}");
            assert!(!allowed.is_empty() && !error.to_string().contains('\n'), "{error}");
        }
    }

    #[test]
    fn fields_that_do_not_work_together_are_one_error_that_names_both() {
        let conflicts = [
            ("model.heads = 7", "model.hidden_size"),
            ("model.kv_heads = 4", "model.heads"),
            ("model.hidden_size = 30\nmodel.heads = 6", "model.heads"),
            ("model.kv_heads = 3\nmodel.kind = 'gpt2'", "model.heads"),
            ("model.positions = 512", "model.kind"),
            ("model.positions = 127\nmodel.kind = 'gpt2'", "model.context"),
            ("schedule.warmup_steps = 1000000", "train.steps"),
            ("zero.stage = 3\ntrain.recompute = 'never'", "train.recompute"),
        ];
        for (text, other) in conflicts {
            let error = Config::from_toml(text).unwrap().validate().unwrap_err();
            assert!(matches!(error, ConfigError::Conflict { .. }), "{text}: {error}");
            assert!(error.to_string().contains(other), "{text}: {error}");
            assert!(error.to_string().contains(text.split(' ').next().unwrap()), "{error}");
        }
    }

    #[test]
    fn a_stage_is_a_number() {
        assert_eq!(Config::from_toml("zero.stage = 1").unwrap().zero.stage, Stage::Zero1);
    }
}
