//! Gradients, master weights and optimizer states, read and written.

use oxizero::{Buffer, EngineError, Local, ParamId, Scope};
use oxizero_device::kernels::cast;
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::tensor::{self, Tensor};

/// A part of a parameter that is this rank's: its first element, and the values.
type Part = (usize, Py<PyAny>);

impl Engine {
    fn whole(
        &self,
        py: Python<'_>,
        param: usize,
        read: impl Send + FnOnce(&mut oxizero::Engine) -> Result<Option<Buffer>, EngineError>,
    ) -> PyResult<Option<Py<PyAny>>> {
        let whole = self.run(py, read)?;
        whole.map(|whole| tensor::owned(py, whole, &self.shape(param))).transpose()
    }
}

/// A copy of what the engine shows: the tensor outlives the call.
fn copied(local: Option<Local<'_>>) -> Option<(usize, Buffer)> {
    let local = local?;
    let values = local.values();
    let mut copy = Buffer::heap(values.numel(), values.dtype());
    cast(values, copy.view_mut());
    Some((local.elements.start, copy))
}

fn part(py: Python<'_>, copy: Option<(usize, Buffer)>) -> PyResult<Option<Part>> {
    let part = |(start, copy): (usize, Buffer)| {
        let numel = copy.numel().0;
        Ok((start, tensor::owned(py, copy, &[numel])?))
    };
    copy.map(part).transpose()
}

#[pymethods]
impl Engine {
    /// A whole gradient; a collective call. `None` for a frozen parameter.
    fn full_grad(&self, py: Python<'_>, param: usize) -> PyResult<Option<Py<PyAny>>> {
        self.whole(py, param, |engine| engine.full_grad(ParamId(param)))
    }

    /// Replaces a whole gradient; a collective call.
    fn set_full_grad(&self, py: Python<'_>, param: usize, values: Tensor<'_>) -> PyResult<()> {
        let values = values.view()?;
        self.run(py, |engine| engine.set_full_grad(ParamId(param), values))
    }

    /// All gradients, by parameter; a collective for each group of parameters, and where whole
    /// tensors are asked for of which ranks hold parts, for those parts.
    fn full_grads(&self, py: Python<'_>, whole: bool) -> PyResult<Vec<Option<Py<PyAny>>>> {
        let scope = if whole { Scope::Global } else { Scope::DataParallel };
        let (grads, count) = self.run(py, |engine| {
            let grads = engine.full_grads(scope)?;
            Ok((grads, engine.params().len()))
        })?;
        tensor::model_grads(py, grads, count)
    }

    /// The norm of each parameter's gradient; a collective call.
    fn grad_norms(&self, py: Python<'_>) -> PyResult<Vec<Option<f64>>> {
        self.run(py, oxizero::Engine::grad_norms)
    }

    /// The part of a gradient that this rank updates; a collective call.
    fn local_grad(&self, py: Python<'_>, param: usize) -> PyResult<Option<Part>> {
        let copy = self.run(py, |engine| engine.local_grad(ParamId(param)).map(copied))?;
        part(py, copy)
    }

    /// Replaces that part; a collective call.
    fn set_local_grad(&self, py: Python<'_>, param: usize, values: Tensor<'_>) -> PyResult<()> {
        let values = values.view()?;
        self.run(py, |engine| engine.set_local_grad(ParamId(param), values))
    }

    /// Whole master weights; a collective call. `None` for a frozen parameter.
    fn full_param(&self, py: Python<'_>, param: usize) -> PyResult<Option<Py<PyAny>>> {
        self.whole(py, param, |engine| engine.full_param(ParamId(param)))
    }

    /// Replaces master and model weights; a collective call.
    fn set_full_param(&self, py: Python<'_>, param: usize, values: Tensor<'_>) -> PyResult<()> {
        let values = values.view()?;
        self.run(py, |engine| engine.set_full_param(ParamId(param), values))
    }

    /// The part of the master weights that this rank updates.
    fn local_param(&self, py: Python<'_>, param: usize) -> PyResult<Option<Part>> {
        let copy = self.run(py, |engine| engine.local_param(ParamId(param)).map(copied))?;
        part(py, copy)
    }

    /// Replaces that part, and the model weights; a collective call.
    fn set_local_param(&self, py: Python<'_>, param: usize, values: Tensor<'_>) -> PyResult<()> {
        let values = values.view()?;
        self.run(py, |engine| engine.set_local_param(ParamId(param), values))
    }

    /// A whole optimizer state; a collective call. `None` for a frozen parameter.
    fn full_state(&self, py: Python<'_>, param: usize, key: &str) -> PyResult<Option<Py<PyAny>>> {
        self.whole(py, param, |engine| engine.full_state(ParamId(param), key))
    }

    /// Replaces a whole optimizer state; a collective call.
    fn set_full_state(
        &self,
        py: Python<'_>,
        param: usize,
        key: &str,
        values: Tensor<'_>,
    ) -> PyResult<()> {
        let values = values.view()?;
        self.run(py, |engine| engine.set_full_state(ParamId(param), key, values))
    }

    /// The part of an optimizer state that this rank updates.
    fn local_state(&self, py: Python<'_>, param: usize, key: &str) -> PyResult<Option<Part>> {
        let copy = self.run(py, |engine| engine.local_state(ParamId(param), key).map(copied))?;
        part(py, copy)
    }

    /// Replaces that part; a collective call.
    fn set_local_state(
        &self,
        py: Python<'_>,
        param: usize,
        key: &str,
        values: Tensor<'_>,
    ) -> PyResult<()> {
        let values = values.view()?;
        self.run(py, |engine| engine.set_local_state(ParamId(param), key, values))
    }
}
