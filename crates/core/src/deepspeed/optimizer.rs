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
    /// Lion.
    Lion {
        /// The weight of the average in the direction of a step, and the decay of the average.
        betas: [f64; 2],
    },
    /// Adagrad.
    Adagrad {
        /// How fast the learning rate falls.
        lr_decay: f64,
        /// What the sums of squares start from.
        initial_accumulator_value: f64,
        /// What is added to the denominator.
        eps: f64,
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
    Lion,
    Adagrad,
}

/// The names that the file may give, each meaning one rule however it is implemented.
const KINDS: &[(&str, Kind)] = &[
    ("AdamW", Kind::AdamW),
    ("Adam", Kind::Adam),
    ("SGD", Kind::Sgd),
    ("Lion", Kind::Lion),
    ("Adagrad", Kind::Adagrad),
    ("FusedAdam", Kind::Adam),
    ("DeepSpeedCPUAdam", Kind::Adam),
    ("FusedLion", Kind::Lion),
    ("DeepSpeedCPULion", Kind::Lion),
    ("DeepSpeedCPUAdagrad", Kind::Adagrad),
];

const ADAMW_WORKS: &str = "write \"AdamW\"";

/// Optimizers that others have, why they are not here, and the nearest that is.
const REFUSED: &[(&[&str], &str, &str)] = &[
    (
        &["Lamb", "FusedLamb", "LARS"],
        "a step is scaled by the norm of a whole layer, which no shard knows",
        ADAMW_WORKS,
    ),
    (&["Muon"], "it makes whole matrices orthogonal, which no shard can", ADAMW_WORKS),
    (
        &["OneBitAdam", "ZeroOneAdam", "OneBitLamb"],
        "gradients are not compressed to bits",
        "write \"AdamW\", and `communication_data_type` to say what travels",
    ),
    (
        &["MuAdam", "MuAdamW", "MuSGD"],
        "learning rates by width are not the engine's to set",
        "pass torch's AdamW, Adam or SGD with such groups to initialize()",
    ),
    (
        &["Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"],
        "the engine has no such rule",
        ADAMW_WORKS,
    ),
    (&["SparseAdam"], "gradients are dense", ADAMW_WORKS),
    (&["LBFGS"], "a step evaluates the loss more than once", ADAMW_WORKS),
];

/// Reads the section.
pub(super) fn parse(mut section: Section) -> Result<OptimizerSettings, ConfigError> {
    section.refuse_names("type", REFUSED)?;
    let kind = section.required_one_of("type", KINDS)?;
    section.off(&[("legacy_fusion", "there is one optimizer for each rule, the engine's")])?;
    let params = section.inner("params")?;
    section.end()?;
    settings(kind, params)
}

fn settings(kind: Kind, mut params: Section) -> Result<OptimizerSettings, ConfigError> {
    let lr = params.number("lr")?;
    let weight_decay = params.number("weight_decay")?;
    // What chooses among implementations: here is one of each rule.
    for name in ["foreach", "fused", "capturable"] {
        params.switch(name)?;
    }
    let of_torch =
        matches!(kind, Kind::Adam | Kind::AdamW) && params.switch("torch_adam")?.unwrap_or(false);
    params.only("fp32_optimizer_states", true, "optimizer states are f32")?;
    params.only("set_grad_none", true, "gradients are dropped as the engine takes them")?;
    params.off(&[
        ("max_grad_norm", "the norm is clipped for all groups; write `gradient_clipping`"),
        ("maximize", "steps go down; negate the loss"),
        ("differentiable", "a step has no gradient"),
    ])?;
    let rule = match kind {
        Kind::AdamW => {
            params.only("adam_w_mode", true, "AdamW decouples weight decay, and Adam may not")?;
            RuleSettings::AdamW(adam(&mut params)?)
        }
        // DeepSpeed's Adam decouples weight decay unless it is told not to.
        Kind::Adam => match params.switch("adam_w_mode")? {
            Some(false) => RuleSettings::Adam(adam(&mut params)?),
            _ => RuleSettings::AdamW(adam(&mut params)?),
        },
        Kind::Sgd => sgd(&mut params)?,
        Kind::Lion => {
            // DeepSpeed's default; the paper's second one is 0.99.
            RuleSettings::Lion { betas: params.betas("betas")?.unwrap_or([0.9, 0.999]) }
        }
        Kind::Adagrad => adagrad(&mut params)?,
    };
    params.end()?;
    let (lr_default, decay_default) = match rule {
        RuleSettings::Adagrad { .. } => (1e-2, 0.0),
        RuleSettings::AdamW(_) if of_torch => (1e-3, 1e-2),
        _ => (1e-3, 0.0),
    };
    Ok(OptimizerSettings {
        lr: lr.unwrap_or(lr_default),
        weight_decay: weight_decay.unwrap_or(decay_default),
        rule,
    })
}

fn adam(params: &mut Section) -> Result<AdamSettings, ConfigError> {
    let betas = params.betas("betas")?.unwrap_or([0.9, 0.999]);
    let eps = params.positive("eps")?.unwrap_or(1e-8);
    params.only("bias_correction", true, "the moments are always corrected")?;
    params.off(&[("amsgrad", "AMSGrad is not available")])?;
    Ok(AdamSettings { betas, eps })
}

fn sgd(params: &mut Section) -> Result<RuleSettings, ConfigError> {
    let momentum = params.below_one("momentum")?.unwrap_or(0.0);
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

fn adagrad(params: &mut Section) -> Result<RuleSettings, ConfigError> {
    params.off(&[("amsgrad", "AMSGrad is not available")])?;
    Ok(RuleSettings::Adagrad {
        lr_decay: params.number("lr_decay")?.unwrap_or(0.0),
        initial_accumulator_value: params.normal("initial_accumulator_value")?.unwrap_or(0.0),
        eps: params.positive("eps")?.unwrap_or(1e-10),
    })
}
