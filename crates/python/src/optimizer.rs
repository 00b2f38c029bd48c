//! Optimizer groups as torch's `param_groups` describe them.

use oxizero::optim::{
    Adagrad, AdagradOptions, Adam, AdamW, Lion, LionOptions, MomentOptions, Momentum, OptimError,
    Optimizer, Sgd,
};
use oxizero::{GroupOptions, OptimGroup};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::{FromPyObject, IntoPyObject};

use crate::error::raised;
use crate::torch::TorchRule;

/// An optimizer group: its rule by name, and torch's names for the rest.
#[derive(Clone, Debug, FromPyObject, IntoPyObject, PartialEq)]
#[pyo3(from_item_all)]
pub(crate) struct Group {
    rule: String,
    lr: f64,
    weight_decay: f64,
    #[pyo3(default = (0.9, 0.999))]
    betas: (f64, f64),
    #[pyo3(default = 1e-8)]
    eps: f64,
    /// SGD's; `None` where no group has one, so that no buffer is kept.
    #[pyo3(default)]
    momentum: Option<f64>,
    #[pyo3(default)]
    nesterov: bool,
    #[pyo3(default)]
    lr_decay: f64,
    #[pyo3(default)]
    initial_accumulator_value: f32,
}

/// Who updates weights.
pub(crate) enum Rules {
    Native,
    /// This function of Python's.
    Torch(Py<PyAny>),
}

impl Group {
    /// Learning rate and weight decay.
    pub(crate) fn options(&self) -> GroupOptions {
        GroupOptions { lr: self.lr, weight_decay: self.weight_decay }
    }

    /// Refuses hyper-parameters that no update rule has.
    pub(crate) fn check(&self) -> PyResult<()> {
        self.native().map(drop)
    }

    /// The update rule.
    pub(crate) fn rule(&self, rules: &Rules) -> PyResult<Box<dyn Optimizer>> {
        let native = self.native()?;
        match rules {
            Rules::Native => Ok(native),
            Rules::Torch(update) => {
                let update = Python::attach(|py| update.clone_ref(py));
                Ok(Box::new(TorchRule { native, group: self.clone(), update }))
            }
        }
    }

    fn native(&self) -> PyResult<Box<dyn Optimizer>> {
        let (beta1, beta2) = self.betas;
        let options = MomentOptions { beta1, beta2, eps: self.eps };
        let rule: Result<Box<dyn Optimizer>, OptimError> = match self.rule.as_str() {
            "adamw" => AdamW::new(options).map(|rule| Box::new(rule) as _),
            "adam" => Adam::new(options).map(|rule| Box::new(rule) as _),
            "sgd" => self.sgd().map(|rule| Box::new(rule) as _),
            "lion" => Lion::new(LionOptions { beta1, beta2 }).map(|rule| Box::new(rule) as _),
            "adagrad" => Adagrad::new(self.adagrad()).map(|rule| Box::new(rule) as _),
            other => {
                let known = "adamw, adam, sgd, lion and adagrad";
                let why = format!("no update rule `{other}`; there are {known}");
                return Err(PyValueError::new_err(why));
            }
        };
        rule.map_err(|error| raised(error.into()))
    }

    fn sgd(&self) -> Result<Sgd, OptimError> {
        let Some(momentum) = self.momentum else { return Sgd::new(Momentum::None) };
        let kind = if self.nesterov { Momentum::Nesterov } else { Momentum::Classical };
        Sgd::new(kind(momentum)).map(Sgd::keeping_buffer)
    }

    fn adagrad(&self) -> AdagradOptions {
        let Self { lr_decay, initial_accumulator_value: initial_sum, eps, .. } = *self;
        AdagradOptions { lr_decay, initial_sum, eps }
    }

    /// Makes group `index` of the engine like this one, which was like `before`.
    pub(crate) fn apply(
        &self,
        engine: &mut oxizero::Engine,
        index: usize,
        before: Option<&Self>,
        rules: &Rules,
    ) -> PyResult<()> {
        if before == Some(self) {
            return Ok(());
        }
        let group = OptimGroup(index);
        engine.set_group(group, self.options()).map_err(raised)?;
        let same = |before: &Self| {
            let Self { lr, weight_decay, .. } = *self;
            Self { lr, weight_decay, ..before.clone() } == *self
        };
        if before.is_some_and(same) {
            return Ok(());
        }
        engine.set_rule(group, self.rule(rules)?).map_err(raised)
    }
}
