//! The section `scheduler`.

use super::section::{NUMBERS, Numbers, Section};
use crate::ConfigError;

/// A learning-rate schedule by its name in DeepSpeed, and the parameters that the file gives; what
/// it does not give has DeepSpeed's default.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerSettings {
    /// Which schedule.
    pub kind: SchedulerKind,
    /// The parameters by name.
    pub params: Vec<(&'static str, SchedulerValue)>,
}

/// The schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerKind {
    /// Rises, and stays.
    WarmupLr,
    /// Rises, and falls in a straight line.
    WarmupDecayLr,
    /// Rises, and falls in half a period of a cosine.
    WarmupCosineLr,
    /// Rises and falls once, the momentum against it, and then decays.
    OneCycle,
    /// Rises for ever, to see where training diverges.
    LrRangeTest,
}

/// The value of a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum SchedulerValue {
    /// A number.
    Number(f64),
    /// A number for each optimizer group.
    PerGroup(Vec<f64>),
    /// A whole number.
    Integer(i64),
    /// Yes or no.
    Switch(bool),
    /// One of several names.
    Name(&'static str),
}

impl SchedulerKind {
    /// DeepSpeed's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::WarmupLr => "WarmupLR",
            Self::WarmupDecayLr => "WarmupDecayLR",
            Self::WarmupCosineLr => "WarmupCosineLR",
            Self::OneCycle => "OneCycle",
            Self::LrRangeTest => "LRRangeTest",
        }
    }

    fn fields(self) -> &'static [Field] {
        match self {
            Self::WarmupLr => WARMUP,
            Self::WarmupDecayLr => WARMUP_DECAY,
            Self::WarmupCosineLr => WARMUP_COSINE,
            Self::OneCycle => ONE_CYCLE,
            Self::LrRangeTest => LR_RANGE_TEST,
        }
    }
}

/// What a parameter may be.
#[derive(Clone, Copy)]
enum Allowed {
    /// 0 or more.
    Number,
    /// 0 or more, or as many of them as there are groups.
    PerGroup,
    /// Of either sign.
    Signed,
    /// At least so much.
    Integer(i64),
    Switch,
    WarmupType,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    Required,
    Optional,
}

type Field = (&'static str, Allowed, Need);

/// What every schedule resumes after; -1 for the beginning.
const RESUMED: Field = ("last_batch_iteration", Allowed::Integer(-1), Need::Optional);
const MIN_LR: Field = ("warmup_min_lr", Allowed::PerGroup, Need::Optional);
const MAX_LR: Field = ("warmup_max_lr", Allowed::PerGroup, Need::Optional);
const WARMUP_STEPS: Field = ("warmup_num_steps", Allowed::Integer(1), Need::Optional);
const WARMUP_TYPE: Field = ("warmup_type", Allowed::WarmupType, Need::Optional);
const TOTAL_STEPS: Field = ("total_num_steps", Allowed::Integer(1), Need::Required);

const WARMUP: &[Field] = &[MIN_LR, MAX_LR, WARMUP_STEPS, WARMUP_TYPE, RESUMED];

const WARMUP_DECAY: &[Field] = &[TOTAL_STEPS, MIN_LR, MAX_LR, WARMUP_STEPS, WARMUP_TYPE, RESUMED];

const WARMUP_COSINE: &[Field] = &[
    TOTAL_STEPS,
    ("warmup_min_ratio", Allowed::Number, Need::Optional),
    WARMUP_STEPS,
    ("cos_min_ratio", Allowed::Number, Need::Optional),
    WARMUP_TYPE,
    RESUMED,
];

const ONE_CYCLE: &[Field] = &[
    ("cycle_min_lr", Allowed::PerGroup, Need::Required),
    ("cycle_max_lr", Allowed::PerGroup, Need::Required),
    ("decay_lr_rate", Allowed::Number, Need::Optional),
    ("cycle_first_step_size", Allowed::Integer(1), Need::Optional),
    ("cycle_second_step_size", Allowed::Integer(0), Need::Optional),
    ("cycle_first_stair_count", Allowed::Integer(-1), Need::Optional),
    ("cycle_second_stair_count", Allowed::Integer(-1), Need::Optional),
    ("decay_step_size", Allowed::Integer(0), Need::Optional),
    ("cycle_momentum", Allowed::Switch, Need::Optional),
    ("cycle_min_mom", Allowed::PerGroup, Need::Optional),
    ("cycle_max_mom", Allowed::PerGroup, Need::Optional),
    ("decay_mom_rate", Allowed::Signed, Need::Optional),
    RESUMED,
];

const LR_RANGE_TEST: &[Field] = &[
    ("lr_range_test_min_lr", Allowed::PerGroup, Need::Optional),
    ("lr_range_test_step_size", Allowed::Integer(1), Need::Optional),
    ("lr_range_test_step_rate", Allowed::Number, Need::Optional),
    ("lr_range_test_staircase", Allowed::Switch, Need::Optional),
    RESUMED,
];

/// Schedules that DeepSpeed looks up in torch.
const TORCHS: &[(&[&str], &str, &str)] = &[(
    &[
        "ChainedScheduler",
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LambdaLR",
        "LinearLR",
        "MultiplicativeLR",
        "MultiStepLR",
        "OneCycleLR",
        "PolynomialLR",
        "ReduceLROnPlateau",
        "SequentialLR",
        "StepLR",
    ],
    "it is torch's, and not made here",
    "pass lr_scheduler to initialize(), a function that makes one of the optimizer",
)];

const WARMUP_TYPES: &[(&str, &str)] = &[("log", "log"), ("linear", "linear")];

/// Reads the section.
pub(super) fn parse(mut section: Section) -> Result<SchedulerSettings, ConfigError> {
    let kinds = [
        SchedulerKind::WarmupLr,
        SchedulerKind::WarmupDecayLr,
        SchedulerKind::WarmupCosineLr,
        SchedulerKind::OneCycle,
        SchedulerKind::LrRangeTest,
    ];
    let kinds = kinds.map(|kind| (kind.name(), kind));
    section.refuse_names("type", TORCHS)?;
    let kind = section.required_one_of("type", &kinds)?;
    let mut params = section.inner("params")?;
    section.end()?;
    let mut given = Vec::new();
    for (name, allowed, need) in kind.fields() {
        match value(&mut params, name, *allowed)? {
            Some(value) => given.push((*name, value)),
            None if *need == Need::Required => return missing(&params, name, *allowed),
            None => {}
        }
    }
    params.end()?;
    Ok(SchedulerSettings { kind, params: given })
}

fn value(
    params: &mut Section,
    name: &'static str,
    allowed: Allowed,
) -> Result<Option<SchedulerValue>, ConfigError> {
    Ok(match allowed {
        Allowed::Number => params.number(name)?.map(SchedulerValue::Number),
        Allowed::PerGroup => params.numbers(name)?.map(|numbers| match numbers {
            Numbers::One(number) => SchedulerValue::Number(number),
            Numbers::Each(numbers) => SchedulerValue::PerGroup(numbers),
        }),
        Allowed::Signed => params.signed(name)?.map(SchedulerValue::Number),
        Allowed::Integer(min) => params.integer(name, min)?.map(SchedulerValue::Integer),
        Allowed::Switch => params.switch(name)?.map(SchedulerValue::Switch),
        Allowed::WarmupType => params.one_of(name, WARMUP_TYPES)?.map(SchedulerValue::Name),
    })
}

fn missing<T>(params: &Section, name: &str, allowed: Allowed) -> Result<T, ConfigError> {
    let allowed = match allowed {
        Allowed::Integer(min) => format!("a whole number, {min} or more"),
        _ => NUMBERS.into(),
    };
    params.value_error(name, &serde_json::Value::Null, &allowed)
}
