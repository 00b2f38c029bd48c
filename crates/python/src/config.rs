//! DeepSpeed's configuration, as Python reads it.

use oxizero::{DType, WorldSize};
use oxizero_core::deepspeed::{
    BackEnd, DeepSpeedConfig, LastBatch, LeafModules, LogLevel, ModelSave, RuleSettings,
    SchedulerValue,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error;

/// A configuration that was read.
#[pyclass(frozen, module = "oxizero._oxizero")]
pub(crate) struct Config(pub(crate) DeepSpeedConfig);

/// A world of so many ranks.
pub(crate) fn world_size(ranks: usize) -> PyResult<WorldSize> {
    WorldSize::new(ranks).ok_or_else(|| PyValueError::new_err("a world has 1 rank or more"))
}

/// torch's name of a dtype.
pub(crate) fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
    }
}

/// The dtype that torch calls so.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    let found = DType::ALL.into_iter().find(|dtype| torch_name(*dtype) == name);
    found.ok_or_else(|| {
        let why = format!("`{name}` parameters; the engine takes float32, bfloat16 and float16");
        PyValueError::new_err(why)
    })
}

#[pymethods]
impl Config {
    /// Reads JSON for a world of so many ranks.
    #[new]
    fn new(json: &str, ranks: usize) -> PyResult<Self> {
        DeepSpeedConfig::from_json(json, world_size(ranks)?).map(Self).map_err(error::config)
    }

    /// The leaf modules that are declared: classes, names, and suffixes of names.
    #[getter]
    fn leaf_modules(&self) -> (Vec<String>, Vec<String>, Vec<String>) {
        let LeafModules { classes, names, name_suffixes } = self.0.leaf_modules.clone();
        (classes, names, name_suffixes)
    }

    /// Whether a file of the model's weights is made where they rest sharded.
    #[getter]
    fn gathers_on_save(&self) -> bool {
        self.0.model_save == ModelSave::Gathered
    }

    /// Elements that are gathered ahead at most, and those that are whole at once.
    #[getter]
    fn prefetch(&self) -> (usize, usize) {
        (self.0.prefetch.numel_max.0, self.0.prefetch.live_numel_max.0)
    }

    /// The ZeRO stage.
    #[getter]
    fn stage(&self) -> u8 {
        u8::from(self.0.stage)
    }

    /// Samples of one rank's micro-batch, if the file says.
    #[getter]
    fn micro_batch_size(&self) -> Option<usize> {
        self.0.batch.micro
    }

    /// Micro-batches of a rank in one step.
    #[getter]
    fn accumulation(&self) -> usize {
        self.0.batch.accumulation
    }

    /// Samples of all ranks in one step, if the file says.
    #[getter]
    fn train_batch_size(&self) -> Option<usize> {
        self.0.batch.train
    }

    /// torch's name of the dtype that float32 parameters are cast to, if any.
    #[getter]
    fn model_dtype(&self) -> Option<&'static str> {
        self.0.model_dtype.map(torch_name)
    }

    /// What the norm of gradients is clipped to; 0 where it is not.
    #[getter]
    fn gradient_clipping(&self) -> f64 {
        self.0.clip_norm.unwrap_or(0.0)
    }

    /// Steps between lines of progress, if any are wanted.
    #[getter]
    fn steps_per_print(&self) -> Option<usize> {
        self.0.steps_per_print
    }

    /// The name of the back end that is asked for, if one is.
    #[getter]
    fn backend(&self) -> Option<&'static str> {
        self.0.back_end.map(|back_end| match back_end {
            BackEnd::Native => "native",
            BackEnd::Torch => "torch",
        })
    }

    /// Whether a data loader drops the last, incomplete batch.
    #[getter]
    fn dataloader_drop_last(&self) -> bool {
        self.0.last_batch == LastBatch::Dropped
    }

    /// What is done where the file is silent and DeepSpeed would do something else.
    #[getter]
    fn notes(&self) -> Vec<&'static str> {
        self.0.notes.clone()
    }

    /// `logging`'s name of the level that is logged, if the file says.
    #[getter]
    fn log_level(&self) -> Option<&'static str> {
        self.0.log_level.map(|level| match level {
            LogLevel::Debug => "DEBUG",
            LogLevel::Info => "INFO",
            LogLevel::Warning => "WARNING",
            LogLevel::Error => "ERROR",
            LogLevel::Critical => "CRITICAL",
        })
    }

    /// The schedule's name, and the parameters that the file gives; `None` if the file has none.
    #[getter]
    fn scheduler<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Option<(&'static str, Bound<'py, PyDict>)>> {
        let Some(scheduler) = &self.0.scheduler else { return Ok(None) };
        let params = PyDict::new(py);
        for (name, value) in &scheduler.params {
            match value {
                SchedulerValue::Number(number) => params.set_item(name, number),
                SchedulerValue::PerGroup(numbers) => params.set_item(name, numbers),
                SchedulerValue::Integer(integer) => params.set_item(name, integer),
                SchedulerValue::Switch(on) => params.set_item(name, on),
                SchedulerValue::Name(chosen) => params.set_item(name, chosen),
            }?;
        }
        Ok(Some((scheduler.kind.name(), params)))
    }

    /// The optimizer's settings, with the name of its rule; `None` if the file has none.
    #[getter]
    fn optimizer<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(optimizer) = self.0.optimizer else { return Ok(None) };
        let settings = PyDict::new(py);
        settings.set_item("lr", optimizer.lr)?;
        settings.set_item("weight_decay", optimizer.weight_decay)?;
        let (rule, adam) = match optimizer.rule {
            RuleSettings::Adam(adam) => ("adam", Some(adam)),
            RuleSettings::AdamW(adam) => ("adamw", Some(adam)),
            RuleSettings::Sgd { momentum, nesterov } => {
                settings.set_item("momentum", momentum)?;
                settings.set_item("nesterov", nesterov)?;
                ("sgd", None)
            }
            RuleSettings::Lion { betas } => {
                settings.set_item("betas", (betas[0], betas[1]))?;
                ("lion", None)
            }
            RuleSettings::Adagrad { lr_decay, initial_accumulator_value, eps } => {
                settings.set_item("lr_decay", lr_decay)?;
                settings.set_item("initial_accumulator_value", initial_accumulator_value)?;
                settings.set_item("eps", eps)?;
                ("adagrad", None)
            }
        };
        if let Some(adam) = adam {
            settings.set_item("betas", (adam.betas[0], adam.betas[1]))?;
            settings.set_item("eps", adam.eps)?;
        }
        settings.set_item("rule", rule)?;
        Ok(Some(settings))
    }
}
