//! The configuration that DeepSpeed's users have: JSON with DeepSpeed's names.
//!
//! Every field is honoured, or refused by name with the reason and what to write instead; none is
//! ignored. Absent fields mean what they mean to DeepSpeed, but where this page says otherwise.
//! Source: DeepSpeed 0.19, `runtime/config.py` and `runtime/zero/config.py`. Reads no files.

mod activations;
#[cfg(test)]
mod every_field;
mod off;
mod optimizer;
mod scheduler;
mod section;
mod stage3;
#[cfg(test)]
mod tests;

use serde_json::Value;

use self::section::{Section, shown};
use crate::{
    ConfigError, DType, DynamicLossScale, LossScale, LossScaling, Numel, Placement, Precision,
    Stage, WorldSize,
};

pub use self::optimizer::{AdamSettings, OptimizerSettings, RuleSettings};
pub use self::scheduler::{SchedulerKind, SchedulerSettings, SchedulerValue};
pub use self::stage3::LeafModules;

/// What a configuration asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepSpeedConfig {
    /// What rests sharded.
    pub stage: Stage,
    /// Samples and micro-batches.
    pub batch: BatchSizes,
    /// The dtype that f32 parameters are cast to; `None` where all keep their own.
    pub model_dtype: Option<DType>,
    /// The dtype that gradients travel in; `None` for the model's.
    pub reduce: Option<DType>,
    /// The dtype of gradient accumulators; f32 unless asked otherwise.
    pub accumulate: DType,
    /// How losses are scaled.
    pub loss_scaling: LossScaling,
    /// Whether steps with gradients that are not finite are skipped. DeepSpeed does so by default
    /// for fp16 alone; here it is the rule.
    pub check_finite: bool,
    /// The largest global gradient norm; `None` for no clipping.
    pub clip_norm: Option<f64>,
    /// What stage 3 gathers and reduces as a whole.
    pub leaf_modules: LeafModules,
    /// The most elements that are communicated together. DeepSpeed's default of 500 million leaves
    /// nothing to do while backward runs; here it is 16 Mi.
    pub bucket_numel_max: Numel,
    /// The optimizer, if the file names one.
    pub optimizer: Option<OptimizerSettings>,
    /// The schedule of the learning rate, if the file names one.
    pub scheduler: Option<SchedulerSettings>,
    /// What is logged, if the file says.
    pub log_level: Option<LogLevel>,
    /// A line is printed after so many steps; `None` for none.
    pub steps_per_print: Option<usize>,
    /// What a data loader does with the last batch, if it is incomplete.
    pub last_batch: LastBatch,
    /// Who has a copy of the model weights where these rest replicated: `oxizero.share_weights`,
    /// which DeepSpeed has not.
    pub copies: WeightCopies,
    /// What the engine runs on, from the section `oxizero`, which DeepSpeed does not have; `None`
    /// for what the model's device asks for.
    pub back_end: Option<BackEnd>,
    /// Whether the native back end's collectives run beside the model's arithmetic; `None` for
    /// where there are more processors than ranks. torch's run where torch has them.
    pub overlap: Option<bool>,
    /// The file that tells what each rank did, and when, if one is asked for: `oxizero.trace`,
    /// which DeepSpeed has not.
    pub trace: Option<String>,
}

/// Who has a copy of replicated model weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightCopies {
    /// Each rank, which may write to it.
    Ranks,
    /// Each machine, whose ranks only read it between steps.
    Machines,
}

/// What an engine of the PyTorch front-end runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackEnd {
    /// The host, and Rust kernels.
    Native,
    /// Any device, by torch's operations and `torch.distributed`.
    Torch,
}

/// What is logged: messages at least so grave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    /// All.
    Debug,
    /// What was done.
    Info,
    /// What may be wrong.
    Warning,
    /// What is wrong.
    Error,
    /// What ends the run.
    Critical,
}

/// What becomes of an incomplete batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastBatch {
    /// It is trained on.
    Kept,
    /// It is dropped.
    Dropped,
}

/// Samples in a batch; `train = micro * accumulation * world size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSizes {
    /// Samples of one rank's micro-batch; `None` where the file does not say.
    pub micro: Option<usize>,
    /// Micro-batches of a rank in one step.
    pub accumulation: usize,
    /// Samples of all ranks in one step; `None` where the file does not say.
    pub train: Option<usize>,
}

const DTYPES: &[(&str, DType)] =
    &[("fp32", DType::F32), ("bf16", DType::Bf16), ("fp16", DType::F16)];

const LOG_LEVELS: &[(&str, LogLevel)] = &[
    ("debug", LogLevel::Debug),
    ("info", LogLevel::Info),
    ("warning", LogLevel::Warning),
    ("error", LogLevel::Error),
    ("critical", LogLevel::Critical),
];

const BACK_ENDS: &[(&str, BackEnd)] = &[("native", BackEnd::Native), ("torch", BackEnd::Torch)];

const BUCKET_NUMEL: usize = 16 << 20;

impl DeepSpeedConfig {
    /// Reads a configuration for a world of so many ranks.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Syntax`] if `text` is no JSON object, else an error that names the field.
    pub fn from_json(text: &str, world_size: WorldSize) -> Result<Self, ConfigError> {
        let syntax = |why: String| ConfigError::Syntax { why };
        let value: Value = serde_json::from_str(text).map_err(|error| syntax(error.to_string()))?;
        let Value::Object(fields) = value else {
            return Err(syntax(format!("it is {}, and must be an object", shown(&value))));
        };
        Self::parse(Section::new("", fields), world_size)
    }

    fn parse(mut top: Section, world_size: WorldSize) -> Result<Self, ConfigError> {
        let batch = batch_sizes(&mut top, world_size)?;
        let (model_dtype, loss_scaling, check_finite) = half(&mut top)?;
        let zero = zero(&mut top)?;
        let reduce = top.one_of("communication_data_type", DTYPES)?;
        let accumulate = data_types(&mut top, model_dtype)?;
        let clip_norm = top.number("gradient_clipping")?.filter(|norm| *norm > 0.0);
        prescaling(&mut top)?;
        let optimizer = top.section("optimizer")?.map(optimizer::parse).transpose()?;
        let scheduler = top.section("scheduler")?.map(scheduler::parse).transpose()?;
        top.section("activation_checkpointing")?.map(activations::parse).transpose()?;
        let steps_per_print = top.count("steps_per_print", 1)?;
        let log_level = top.one_of("log_level", LOG_LEVELS)?;
        let last_batch = match top.switch("dataloader_drop_last")? {
            Some(true) => LastBatch::Dropped,
            _ => LastBatch::Kept,
        };
        what_changes_nothing(&mut top)?;
        let (copies, back_end, trace) = own(&mut top, zero.stage)?;
        top.off(off::TOP)?;
        top.end()?;
        Ok(Self {
            stage: zero.stage,
            batch,
            model_dtype,
            reduce,
            accumulate,
            loss_scaling,
            check_finite,
            clip_norm,
            bucket_numel_max: zero.bucket_numel_max,
            leaf_modules: zero.leaf_modules,
            optimizer,
            scheduler,
            log_level,
            steps_per_print,
            last_batch,
            copies,
            back_end,
            overlap: zero.overlap,
            trace,
        })
    }

    /// The dtypes on a gradient's way, for a model whose parameters have dtype `model`.
    pub fn precision(&self, model: DType) -> Result<Precision, ConfigError> {
        let default = Precision::of_model(model);
        let reduce = self.reduce.unwrap_or(default.reduce);
        let precision = Precision { reduce, accumulate: self.accumulate, ..default };
        if precision.validate().is_err() {
            return Err(ConfigError::Conflict {
                first: format!("data_types.grad_accum_dtype = {}", written(self.accumulate)),
                second: format!("communication_data_type = {}", written(reduce)),
                advice: "the accumulator is fp32, or the dtype that travels".into(),
            });
        }
        Ok(precision)
    }
}

/// DeepSpeed's name of a dtype.
fn written(dtype: DType) -> &'static str {
    DTYPES.iter().find(|(_, known)| *known == dtype).map_or("", |(name, _)| name)
}

fn batch_sizes(top: &mut Section, world_size: WorldSize) -> Result<BatchSizes, ConfigError> {
    let train = top.count("train_batch_size", 1)?;
    let micro = top.count("train_micro_batch_size_per_gpu", 1)?;
    let accumulation = top.count("gradient_accumulation_steps", 1)?;
    let ranks = world_size.get();
    let conflict = |accumulation: usize, micro: Option<usize>| {
        let of_micro = micro.map(|micro| format!(" * train_micro_batch_size_per_gpu = {micro}"));
        Err(ConfigError::Conflict {
            first: format!("train_batch_size = {}", train.unwrap_or_default()),
            second: format!(
                "gradient_accumulation_steps = {accumulation}{}",
                of_micro.unwrap_or_default()
            ),
            advice: format!("with {ranks} ranks they do not make a whole; leave one of them out"),
        })
    };
    let product = |sizes: &[usize]| sizes.iter().try_fold(ranks, |all, n| all.checked_mul(*n));
    let accumulation = match (train, micro, accumulation) {
        (_, _, Some(accumulation)) => accumulation,
        (Some(train), Some(micro), None) => match product(&[micro]) {
            Some(pass) if train.is_multiple_of(pass) => train / pass,
            _ => return conflict(1, Some(micro)),
        },
        _ => 1,
    };
    let micro = match (train, micro) {
        (Some(train), None) => match product(&[accumulation]) {
            Some(passes) if train.is_multiple_of(passes) => Some(train / passes),
            _ => return conflict(accumulation, None),
        },
        _ => micro,
    };
    let whole = micro.and_then(|micro| product(&[micro, accumulation]));
    match (train, whole) {
        (Some(train), whole) if whole != Some(train) => conflict(accumulation, micro),
        _ => Ok(BatchSizes { micro, accumulation, train: whole }),
    }
}

/// The dtype of the model, how losses are scaled, and whether gradients are checked.
fn half(top: &mut Section) -> Result<(Option<DType>, LossScaling, bool), ConfigError> {
    let (new, old) = (top.section("bf16")?, top.section("bfloat16")?);
    if new.is_some() && old.is_some() {
        return Err(ConfigError::Conflict {
            first: "bf16".into(),
            second: "bfloat16".into(),
            advice: "they are two names of one section; keep bf16".into(),
        });
    }
    let bf16 = new.or(old).map(bf16).transpose()?.flatten();
    let fp16 = top.section("fp16")?.map(fp16).transpose()?.flatten();
    match (bf16, fp16) {
        (Some(_), Some(_)) => Err(ConfigError::Conflict {
            first: "bf16.enabled = true".into(),
            second: "fp16.enabled = true".into(),
            advice: "a model has one dtype; bf16 needs no loss scale".into(),
        }),
        (Some(check), None) => Ok((Some(DType::Bf16), LossScaling::default(), check)),
        (None, Some(scaling)) => Ok((Some(DType::F16), scaling, true)),
        (None, None) => Ok((None, LossScaling::default(), true)),
    }
}

/// Whether gradients are checked; `None` where bf16 is off.
fn bf16(mut section: Section) -> Result<Option<bool>, ConfigError> {
    let enabled = section.switch("enabled")?.unwrap_or(false);
    let check = section.switch("check_grad_overflow")?.unwrap_or(true);
    section.switch("immediate_grad_update")?; // gradients are always taken as they come
    section.off(&[
        ("bf16_master_weights_and_grads", "master weights are f32"),
        ("bf16_optimizer_states", "optimizer states are f32"),
    ])?;
    section.end()?;
    Ok(enabled.then_some(check))
}

/// How losses are scaled; `None` where fp16 is off.
fn fp16(mut section: Section) -> Result<Option<LossScaling>, ConfigError> {
    let enabled = section.switch("enabled")?.unwrap_or(false);
    let fixed = section.number("loss_scale")?.filter(|scale| *scale > 0.0);
    let power = section.count("initial_scale_power", 0)?.unwrap_or(16);
    let default = DynamicLossScale::default();
    let dynamic = DynamicLossScale {
        initial: (power as f64).exp2() as f32,
        loss_scale_window: section.count("loss_scale_window", 1)?.unwrap_or(1000) as u64,
        hysteresis: section.count("hysteresis", 1)?.unwrap_or(2) as u64,
        consecutive_hysteresis: section.switch("consecutive_hysteresis")?.unwrap_or(false),
        minimum: section.number("min_loss_scale")?.map_or(default.minimum, |min| min as f32),
    };
    section.off(off::FP16)?;
    section.end()?;
    let scaling = match fixed {
        Some(scale) => LossScaling::Fixed(LossScale::new(scale as f32)?),
        None => LossScaling::Dynamic(dynamic),
    };
    scaling.validate()?;
    Ok(enabled.then_some(scaling))
}

/// What is sharded, in which portions, and whether these travel beside the model's arithmetic.
struct Zero {
    stage: Stage,
    bucket_numel_max: Numel,
    leaf_modules: LeafModules,
    overlap: Option<bool>,
}

fn zero(top: &mut Section) -> Result<Zero, ConfigError> {
    let Some(mut section) = top.section("zero_optimization")? else {
        return Ok(Zero {
            stage: Stage::Zero0,
            bucket_numel_max: Numel(BUCKET_NUMEL),
            leaf_modules: LeafModules::default(),
            overlap: None,
        });
    };
    let stage = section.count("stage", 0)?.unwrap_or(0);
    let stage = match Stage::ALL.get(stage) {
        Some(stage) => *stage,
        None => return section.value_error("stage", &stage.into(), "0, 1, 2, 3"),
    };
    // One bucket serves both, so that the smaller of the two bounds it.
    let reduce = section.count("reduce_bucket_size", 1)?.unwrap_or(usize::MAX);
    let gather = section.count("allgather_bucket_size", 1)?.unwrap_or(usize::MAX);
    let asked = Some(reduce.min(gather)).filter(|numel| *numel != usize::MAX);
    section.only("contiguous_gradients", true, "a bucket's gradients are contiguous")?;
    section.only("reduce_scatter", true, "what rests sharded is reduced to shards")?;
    section.only("allgather_partitions", true, "weights are gathered, not broadcast")?;
    section.only("use_multi_rank_bucket_allreduce", true, "a bucket is reduced for all ranks")?;
    section.only("ignore_unused_parameters", true, "unused parameters contribute zeros")?;
    section.only("compute_grad_norm", true, "the pass that checks gradients gives their norm")?;
    section.only("load_from_fp32_weights", true, off::NOT_HERE)?;
    section.only("override_module_apply", true, off::NOT_HERE)?;
    let overlap = section.switch("overlap_comm")?;
    if let Some(size) = section.count("zero_hpz_partition_size", 1)?.filter(|size| *size > 1) {
        let reason = "all ranks are one group".into();
        let instead = "leave the field out".into();
        let (field, value) = (section.path("zero_hpz_partition_size"), size.to_string());
        return Err(ConfigError::Refused { field, value, reason, instead });
    }
    let leaf_modules = stage3::parse(&mut section)?;
    section.off(off::ZERO)?;
    section.end()?;
    let bucket_numel_max = Numel(asked.unwrap_or(BUCKET_NUMEL));
    Ok(Zero { stage, bucket_numel_max, leaf_modules, overlap })
}

/// The accumulators' dtype; `model` is the one that parameters are cast to.
fn data_types(top: &mut Section, model: Option<DType>) -> Result<DType, ConfigError> {
    let mut section = top.inner("data_types")?;
    let accumulate = section.one_of("grad_accum_dtype", DTYPES)?;
    let params = section.one_of("param_dtype", DTYPES)?;
    if let Some(params) = params.filter(|params| *params != model.unwrap_or(DType::F32)) {
        return Err(ConfigError::Conflict {
            first: format!("data_types.param_dtype = {}", written(params)),
            second: "bf16.enabled, fp16.enabled".into(),
            advice: "these say what parameters are cast to; leave param_dtype out".into(),
        });
    }
    section.off(&[
        ("buffer_dtype", "buffers keep their dtype"),
        ("keep_in_fp32_modules", "buffers keep their dtype"),
    ])?;
    section.end()?;
    Ok(accumulate.unwrap_or(DType::F32))
}

/// Fields that are honoured whatever they say: each permits or prefers what is done, or is checked,
/// in any case.
fn what_changes_nothing(top: &mut Section) -> Result<(), ConfigError> {
    // Every optimizer is checked by itself, and each rule is the engine's.
    top.switch("zero_allow_untested_optimizer")?;
    top.switch("zero_force_ds_cpu_optimizer")?;
    // DeepSpeed warns of sizes that suit a GPU's matrix units badly.
    top.count("vocabulary_size", 1)?;
    // Only sequence-parallel groups would use it.
    top.one_of("seq_parallel_communication_data_type", DTYPES)?;
    let reason = "the configuration says how many micro-batches a step has; \
                  engine.set_gradient_accumulation_boundary() says otherwise";
    top.only("managed_gradient_accumulation", true, reason)?;
    top.refuse_names(
        "gradient_allreduce_op",
        &[(&["sum"], "gradients are averaged", "write \"mean\", and multiply the loss")],
    )?;
    top.one_of("gradient_allreduce_op", &[("mean", ())])?;
    let Some(mut timers) = top.section("timers")? else { return Ok(()) };
    let mut throughput = timers.inner("throughput")?;
    throughput.only("enabled", false, "the engine does not time itself")?;
    throughput.switch("synchronized")?;
    throughput.end()?;
    timers.end()
}

/// The engine's own section: who has a copy of the weights, the back end, where the trace goes.
type Own = (WeightCopies, Option<BackEnd>, Option<String>);

fn own(top: &mut Section, stage: Stage) -> Result<Own, ConfigError> {
    let Some(mut section) = top.section("oxizero")? else {
        return Ok((WeightCopies::Ranks, None, None));
    };
    let trace = section.text("trace")?;
    let back_end = section.one_of("backend", BACK_ENDS)?;
    let share_weights = section.switch("share_weights")?.unwrap_or(false);
    section.end()?;
    if share_weights && stage.model() == Placement::Sharded {
        return Err(ConfigError::Conflict {
            first: "oxizero.share_weights = true".into(),
            second: format!("zero_optimization.stage = {}", u8::from(stage)),
            advice: "weights that rest sharded have no copies to share; use stage 0, 1 or 2".into(),
        });
    }
    let copies = if share_weights { WeightCopies::Machines } else { WeightCopies::Ranks };
    if share_weights && back_end == Some(BackEnd::Torch) {
        return Err(ConfigError::Conflict {
            first: "oxizero.share_weights = true".into(),
            second: "oxizero.backend = \"torch\"".into(),
            advice: "its ranks have a copy of the weights each; use the native back end".into(),
        });
    }
    Ok((copies, back_end, trace))
}

/// Ways to keep sums in narrow dtypes from overflowing, where sums are f32.
fn prescaling(top: &mut Section) -> Result<(), ConfigError> {
    const REASON: &str = "sums over ranks are f32 and are divided once, after them";
    top.only("prescale_gradients", false, REASON)?;
    let factor = top.number("gradient_predivide_factor")?;
    match factor.filter(|factor| *factor != 1.0) {
        Some(factor) => Err(ConfigError::Refused {
            field: top.path("gradient_predivide_factor"),
            value: factor.to_string(),
            reason: REASON.into(),
            instead: "leave the field out; the mean is the same".into(),
        }),
        None => Ok(()),
    }
}
