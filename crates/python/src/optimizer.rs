//! Optimizer groups as torch's `param_groups` describe them.

use oxizero::optim::{Adam, AdamW, MomentOptions, Momentum, OptimError, Optimizer, Sgd};
use oxizero::{GroupOptions, OptimGroup};
use pyo3::FromPyObject;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::raised;

/// An optimizer group: its rule by name, and torch's names for the rest.
#[derive(Clone, Debug, FromPyObject, PartialEq)]
#[pyo3(from_item_all)]
pub(crate) struct Group {
    rule: String,
    lr: f64,
    weight_decay: f64,
    #[pyo3(default = (0.9, 0.999))]
    betas: (f64, f64),
    #[pyo3(default = 1e-8)]
    eps: f64,
    #[pyo3(default)]
    momentum: f64,
    #[pyo3(default)]
    nesterov: bool,
}

impl Group {
    /// Learning rate and weight decay.
    pub(crate) fn options(&self) -> GroupOptions {
        GroupOptions { lr: self.lr, weight_decay: self.weight_decay }
    }

    /// The update rule.
    pub(crate) fn rule(&self) -> PyResult<Box<dyn Optimizer>> {
        let (beta1, beta2) = self.betas;
        let options = MomentOptions { beta1, beta2, eps: self.eps };
        let rule: Result<Box<dyn Optimizer>, OptimError> = match self.rule.as_str() {
            "adamw" => AdamW::new(options).map(|rule| Box::new(rule) as _),
            "adam" => Adam::new(options).map(|rule| Box::new(rule) as _),
            "sgd" => Sgd::new(self.momentum()).map(|rule| Box::new(rule) as _),
            other => {
                let why = format!("no update rule `{other}`; there are adamw, adam and sgd");
                return Err(PyValueError::new_err(why));
            }
        };
        rule.map_err(|error| raised(error.into()))
    }

    fn momentum(&self) -> Momentum {
        match (self.momentum, self.nesterov) {
            (0.0, _) => Momentum::None,
            (momentum, false) => Momentum::Classical(momentum),
            (momentum, true) => Momentum::Nesterov(momentum),
        }
    }

    /// Makes group `index` of the engine like this one, which was like `before`.
    pub(crate) fn apply(
        &self,
        engine: &mut oxizero::Engine,
        index: usize,
        before: Option<&Self>,
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
        engine.set_rule(group, self.rule()?).map_err(raised)
    }
}
