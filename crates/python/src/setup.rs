//! From Python's description of a model to an engine.

use std::collections::BTreeMap;

use oxizero::optim::LrSchedule;
use oxizero::{
    Bucketing, DType, EngineOptions, OptimGroup, OptimizerSetup, ParamSpec, UnitId, View,
};
use oxizero_core::deepspeed::{DeepSpeedConfig, WeightCopies};
use oxizero_core::{Arrangement, ConfigError, Placement};
use pyo3::FromPyObject;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::config::dtype;
use crate::given::Given;
use crate::optimizer::{Group, Rules};

/// A parameter, and the weights that it starts from.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Param<'py> {
    /// Its names; the first is the one in messages.
    names: Vec<String>,
    shape: Vec<usize>,
    /// torch's name of the dtype that its weights are to have.
    dtype: String,
    /// The optimizer group; `None` for a frozen one.
    group: Option<usize>,
    /// What is gathered together, where weights rest sharded: numbered from 0.
    unit: usize,
    /// Weights of any dtype; `None` for zeros.
    pub(crate) initial: Option<Given<'py>>,
}

/// The engine's own description of the parameters.
pub(crate) fn specs(params: &[Param<'_>], arrangement: &Arrangement) -> PyResult<Vec<ParamSpec>> {
    params.iter().map(|param| spec(param, arrangement)).collect()
}

fn spec(param: &Param<'_>, arrangement: &Arrangement) -> PyResult<ParamSpec> {
    let Some((name, aliases)) = param.names.split_first() else {
        return Err(PyValueError::new_err("a parameter without a name"));
    };
    let named = |error: PyErr| {
        let why = Python::attach(|py| error.value(py).to_string());
        PyValueError::new_err(format!("parameter `{name}`: {why}"))
    };
    let dtype = dtype(&param.dtype).map_err(named)?;
    let spec = ParamSpec::new(name, &param.shape, dtype, UnitId(param.unit));
    if let Some(initial) = &param.initial {
        let (has, wants) = (initial.view().map_err(named)?.numel(), spec.numel());
        if has != wants {
            return Err(named(PyValueError::new_err(format!("{has} initial weights of {wants}"))));
        }
    }
    Ok(ParamSpec {
        aliases: aliases.to_vec(),
        group: OptimGroup(param.group.unwrap_or(0)),
        trainable: param.group.is_some(),
        along: arrangement.along(name),
        ..spec
    })
}

/// The weights that parameters start from, other than zeros.
pub(crate) fn initial<'a>(params: &'a [Param<'_>]) -> PyResult<Vec<Option<View<'a>>>> {
    params.iter().map(|param| param.initial.as_ref().map(Given::view).transpose()).collect()
}

/// Which dtype is the model's, where parameters have several: that of the most elements.
fn model_dtype(specs: &[ParamSpec]) -> DType {
    let mut numels: BTreeMap<DType, usize> = BTreeMap::new();
    for spec in specs.iter().filter(|spec| spec.trainable) {
        *numels.entry(spec.dtype).or_default() += spec.numel().0;
    }
    let most = numels.into_iter().max_by_key(|(_, numel)| *numel);
    most.map_or(DType::F32, |(dtype, _)| dtype)
}

/// What the configuration asks of the engine.
pub(crate) fn options(
    config: &DeepSpeedConfig,
    specs: &[ParamSpec],
) -> Result<EngineOptions, ConfigError> {
    let precision = config.precision(config.model_dtype.unwrap_or_else(|| model_dtype(specs)))?;
    let bucketing = match config.stage.model() {
        Placement::Sharded => Bucketing::Unit,
        _ => Bucketing::Bytes(config.bucket_numel_max.bytes(precision.model)),
    };
    Ok(EngineOptions {
        bucketing,
        accumulation: config.batch.accumulation,
        clip_norm: config.clip_norm,
        loss_scaling: config.loss_scaling,
        check_finite: config.check_finite,
        ..EngineOptions::new(config.stage, precision)
    })
}

/// Refuses copies of weights that the back end of that name does not have.
pub(crate) fn check_copies(config: &DeepSpeedConfig, back_end: &str) -> Result<(), ConfigError> {
    match (config.copies, back_end) {
        (WeightCopies::Machines, "torch") => Err(ConfigError::Conflict {
            first: "oxizero.share_weights = true".into(),
            second: "the torch back end".into(),
            advice: "its ranks have a copy of the weights each; use the native one".into(),
        }),
        _ => Ok(()),
    }
}

/// The optimizer that the groups describe; its schedule is torch's, and stays out of it.
pub(crate) fn optimizer(groups: &[Group], rules: &Rules) -> PyResult<OptimizerSetup> {
    let Some(first) = groups.first() else {
        return Err(PyValueError::new_err("an optimizer without groups of parameters"));
    };
    Ok(OptimizerSetup {
        rule: first.rule(rules)?,
        groups: groups.iter().map(Group::options).collect(),
        schedule: LrSchedule::constant(0),
    })
}
