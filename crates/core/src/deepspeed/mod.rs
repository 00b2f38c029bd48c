//! The configuration that DeepSpeed's users have: JSON with DeepSpeed's names.
//!
//! Every field is honoured, or refused by name with the reason and what to write instead; a few are
//! accepted at any value, as there is nothing that they would change (`docs/pytorch.md` says why).
//! None is ignored. Absent fields mean what they mean to DeepSpeed, but where this page says
//! otherwise.
//! Source: DeepSpeed 0.19, `runtime/config.py` and `runtime/zero/config.py`. Reads no files.

mod activations;
mod batch;
#[cfg(test)]
mod every_field;
mod half;
mod off;
mod optimizer;
mod scheduler;
mod section;
mod stage3;
#[cfg(test)]
mod tests;
mod zero;

use serde_json::Value;

use self::section::{Section, shown};
use crate::{
    ConfigError, DType, LossScaling, Numel, Overlap, Placement, Precision, Stage, WorldSize,
};

pub use self::batch::BatchSizes;
pub use self::optimizer::{AdamSettings, OptimizerSettings, RuleSettings};
pub use self::scheduler::{SchedulerKind, SchedulerSettings, SchedulerValue};
pub use self::stage3::{LeafModules, ModelSave, Prefetch};

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
    /// What `save_16bit_model` does with weights that rest sharded.
    pub model_save: ModelSave,
    /// How far weights that rest sharded are gathered ahead.
    pub prefetch: Prefetch,
    /// The most elements that are communicated together. DeepSpeed's default of 500 million leaves
    /// nothing to do while backward runs; here it is 16 Mi.
    pub bucket_numel_max: Numel,
    /// The optimizer, if the file names one.
    pub optimizer: Option<OptimizerSettings>,
    /// The schedule of the learning rate, if the file names one.
    pub scheduler: Option<SchedulerSettings>,
    /// Where the file is silent and DeepSpeed would do something else: what is done, and what to
    /// write.
    pub notes: Vec<&'static str>,
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
    /// Whether collectives run beside the model's arithmetic; `None` for on GPUs, and on CPUs where
    /// there are more processors than ranks.
    pub overlap: Option<Overlap>,
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

const DTYPES: &[(&str, DType)] =
    &[("fp32", DType::F32), ("bf16", DType::Bf16), ("fp16", DType::F16)];

const LOG_LEVELS: &[(&str, LogLevel)] = &[
    ("debug", LogLevel::Debug),
    ("info", LogLevel::Info),
    ("warning", LogLevel::Warning),
    ("error", LogLevel::Error),
    ("critical", LogLevel::Critical),
];

const UNCLIPPED: &str = "`gradient_clipping` is not in the configuration, and gradients are not \
                         clipped; DeepSpeed 0.19 clips them to a norm of 1.0 then: write 1.0 for \
                         that, or 0.0 to have none";

const BACK_ENDS: &[(&str, BackEnd)] = &[("native", BackEnd::Native), ("torch", BackEnd::Torch)];

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
        let batch = batch::parse(&mut top, world_size)?;
        let (model_dtype, loss_scaling, check_finite) = half::parse(&mut top)?;
        let zero = zero::parse(&mut top)?;
        let reduce = top.one_of("communication_data_type", DTYPES)?;
        let accumulate = data_types(&mut top, model_dtype)?;
        let clip_norm = top.normal("gradient_clipping")?;
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
            clip_norm: clip_norm.filter(|norm| *norm > 0.0),
            bucket_numel_max: zero.bucket_numel_max,
            leaf_modules: zero.leaf_modules,
            model_save: zero.model_save,
            prefetch: zero.prefetch,
            optimizer,
            scheduler,
            notes: clip_norm.is_none().then_some(UNCLIPPED).into_iter().collect(),
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
                first: format!("data_types.grad_accum_dtype = {}", dtype_name(self.accumulate)),
                second: format!("communication_data_type = {}", dtype_name(reduce)),
                advice: "the accumulator is fp32, or the dtype that travels".into(),
            });
        }
        Ok(precision)
    }
}

/// DeepSpeed's name of a dtype.
pub fn dtype_name(dtype: DType) -> &'static str {
    DTYPES.iter().find(|(_, known)| *known == dtype).map_or("", |(name, _)| name)
}

/// The accumulators' dtype; `model` is the one that parameters are cast to.
fn data_types(top: &mut Section, model: Option<DType>) -> Result<DType, ConfigError> {
    let mut section = top.inner("data_types")?;
    let accumulate = section.one_of("grad_accum_dtype", DTYPES)?;
    let params = section.one_of("param_dtype", DTYPES)?;
    if let Some(params) = params.filter(|params| *params != model.unwrap_or(DType::F32)) {
        return Err(ConfigError::Conflict {
            first: format!("data_types.param_dtype = {}", dtype_name(params)),
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
