//! The section `optimizer`.

use super::section::Section;
use crate::ConfigError;

/// An update rule and its settings, with DeepSpeed's defaults where the file says nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerSettings {
    /// The learning rate.
    pub lr: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// The rule.
    pub rule: RuleSettings,
}

/// What a rule has beside learning rate and weight decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RuleSettings {
    /// Adam, with weight decay as an L2 penalty.
    Adam(AdamSettings),
    /// Adam with decoupled weight decay.
    AdamW(AdamSettings),
    /// Gradient descent.
    Sgd {
        /// 0 for none.
        momentum: f64,
        /// Whether the momentum looks ahead.
        nesterov: bool,
    },
}

/// Settings of Adam and AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamSettings {
    /// The decays of the moments.
    pub betas: [f64; 2],
    /// What is added to the denominator.
    pub eps: f64,
}

#[derive(Clone, Copy)]
enum Kind {
    Adam,
    AdamW,
    Sgd,
}

pub(super) fn parse(mut section: Section) -> Result<OptimizerSettings, ConfigError> {
    let kinds = [("AdamW", Kind::AdamW), ("Adam", Kind::Adam), ("SGD", Kind::Sgd)];
    let kind = section.one_of("type", &kinds)?;
    section.off(&[("legacy_fusion", "there is one optimizer for each rule, the engine's")])?;
    let params = section.section("params")?;
    let params = params.unwrap_or_else(|| {
        Section::new(&format!("{}.", section.path("params")), serde_json::Map::new())
    });
    let kind = kind.ok_or_else(|| ConfigError::Value {
        field: section.path("type"),
        value: "null".into(),
        allowed: "\"AdamW\", \"Adam\", \"SGD\"".into(),
    })?;
    section.end()?;
    settings(kind, params)
}

fn settings(kind: Kind, mut params: Section) -> Result<OptimizerSettings, ConfigError> {
    let lr = params.number("lr")?.unwrap_or(1e-3);
    let weight_decay = params.number("weight_decay")?.unwrap_or(0.0);
    let rule = match kind {
        Kind::AdamW => RuleSettings::AdamW(adam(&mut params)?),
        // DeepSpeed's Adam decouples weight decay unless it is told not to.
        Kind::Adam => match params.switch("adam_w_mode")? {
            Some(false) => RuleSettings::Adam(adam(&mut params)?),
            _ => RuleSettings::AdamW(adam(&mut params)?),
        },
        Kind::Sgd => sgd(&mut params)?,
    };
    params.end()?;
    Ok(OptimizerSettings { lr, weight_decay, rule })
}

fn adam(params: &mut Section) -> Result<AdamSettings, ConfigError> {
    let betas = params.pair("betas")?.unwrap_or([0.9, 0.999]);
    let eps = params.number("eps")?.unwrap_or(1e-8);
    params.only("bias_correction", true, "the moments are always corrected")?;
    params.off(&[
        ("amsgrad", "AMSGrad is not available"),
        ("torch_adam", "the update is the engine's, which follows torch's"),
    ])?;
    Ok(AdamSettings { betas, eps })
}

fn sgd(params: &mut Section) -> Result<RuleSettings, ConfigError> {
    let momentum = params.number("momentum")?.unwrap_or(0.0);
    let nesterov = params.switch("nesterov")?.unwrap_or(false);
    params.off(&[("dampening", "dampening is not available")])?;
    if nesterov && momentum == 0.0 {
        return Err(ConfigError::Conflict {
            first: format!("{} = true", params.path("nesterov")),
            second: format!("{} = 0", params.path("momentum")),
            advice: "Nesterov's momentum needs a momentum, such as 0.9".into(),
        });
    }
    Ok(RuleSettings::Sgd { momentum, nesterov })
}
