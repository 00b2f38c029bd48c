//! The sections `bf16` and `fp16`: the dtype of the model, and how its losses are scaled.

use super::off;
use super::section::Section;
use crate::{ConfigError, DType, DynamicLossScale, LossScale, LossScaling};

/// The largest power of two that is a float32.
const POWER_MAX: usize = 127;

/// The dtype of the model, how losses are scaled, and whether gradients are checked.
pub(super) fn parse(top: &mut Section) -> Result<(Option<DType>, LossScaling, bool), ConfigError> {
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
    const SCALE: &str = "a number above 0, and at most 3.4e38";
    let enabled = section.switch("enabled")?.unwrap_or(false);
    let fixed = section.normal("loss_scale")?.filter(|scale| *scale > 0.0);
    let power = section.count("initial_scale_power", 0)?.unwrap_or(16);
    if power > POWER_MAX {
        let allowed = format!("a whole number, 0 to {POWER_MAX}: 2 to this power is a float32");
        return section.value_error("initial_scale_power", &power.into(), &allowed);
    }
    let minimum = section.normal("min_loss_scale")?;
    if minimum == Some(0.0) {
        return section.value_error("min_loss_scale", &0.into(), SCALE);
    }
    let dynamic = DynamicLossScale {
        initial: (power as f64).exp2() as f32,
        loss_scale_window: section.count("loss_scale_window", 1)?.unwrap_or(1000) as u64,
        hysteresis: section.count("hysteresis", 1)?.unwrap_or(2) as u64,
        consecutive_hysteresis: section.switch("consecutive_hysteresis")?.unwrap_or(false),
        minimum: minimum.map_or(DynamicLossScale::default().minimum, |min| min as f32),
    };
    if dynamic.initial < dynamic.minimum {
        return Err(ConfigError::Conflict {
            first: format!("{} = {power}", section.path("initial_scale_power")),
            second: format!("{} = {}", section.path("min_loss_scale"), dynamic.minimum),
            advice: "the first scale, 2 to this power, is the smallest or above".into(),
        });
    }
    section.off(off::FP16)?;
    section.end()?;
    let scaling = match fixed {
        Some(scale) => LossScaling::Fixed(LossScale::new(scale as f32)?),
        None => LossScaling::Dynamic(dynamic),
    };
    Ok(enabled.then_some(scaling))
}
