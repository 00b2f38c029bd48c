//! Update rules by torch's operations.

use std::fmt;

use oxizero::optim::{Gradient, Hyper, Optimizer, Weights};
use pyo3::prelude::*;

use super::device::{at_view, ok};
use crate::optimizer::Group;

/// A rule whose update is `oxizero.torch_backend.rules`'s; what it keeps is the native one's.
pub(crate) struct TorchRule {
    pub(crate) native: Box<dyn Optimizer>,
    pub(crate) group: Group,
    /// The function that updates.
    pub(crate) update: Py<PyAny>,
}

impl Optimizer for TorchRule {
    fn description(&self) -> String {
        self.native.description()
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.native.state_names()
    }

    fn initial_state(&self) -> f32 {
        self.native.initial_state()
    }

    fn update(&self, hyper: Hyper, step: u64, grad: Gradient<'_>, weights: Weights<'_>) {
        let Weights { master, states, model } = weights;
        Python::attach(|py| {
            let states: Vec<_> = states.iter().map(|state| at_view(py, state.as_view())).collect();
            let scaled = (at_view(py, grad.values), grad.divisor, grad.factor);
            let model = model.as_ref().map(|model| at_view(py, model.as_view()));
            let weights = (at_view(py, master.as_view()), states, model);
            let hyper = (hyper.lr, hyper.weight_decay, step);
            let group = self.group.clone();
            ok(self.update.bind(py).call1((group, hyper, scaled, weights)));
        });
    }
}

/// The native rule, which tells the ranks' settings apart.
impl fmt::Debug for TorchRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "torch {:?}", self.native)
    }
}
