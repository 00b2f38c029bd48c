//! Gradients, master weights and optimizer states, read and written.

use std::sync::Arc;

use oxizero::{Buffer, EngineError, Local, ParamId, Scope, View};
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::given::Given;
use crate::tensor::{self, GradTensors};

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
        whole.map(|whole| tensor::owned(py, whole, &self.shape(py, param)?)).transpose()
    }

    /// Writes values of a parameter; of `shape`, where they have one. What is none is an error on
    /// all ranks, since all are in the call.
    fn write(
        &self,
        py: Python<'_>,
        (call, param): (&str, usize),
        (values, shape): (&Given<'_>, Option<Vec<usize>>),
        write: impl Send + FnOnce(&mut oxizero::Engine, View<'_>) -> Result<(), EngineError>,
    ) -> PyResult<()> {
        let given = values.shape();
        let problem = match (values.view(), shape) {
            (Err(error), _) => error.value(py).to_string(),
            (Ok(_), Some(shape)) if shape != given => {
                format!("values of shape {given:?} were given, and it has the shape {shape:?}")
            }
            (Ok(values), _) => return self.run(py, |engine| write(engine, values)),
        };
        self.run(py, |engine| {
            let name = engine.params().get(param).map(|spec| spec.name.clone());
            let why = EngineError::Param { param: name.unwrap_or_default(), problem };
            Err(engine.refuse(call, Some(ParamId(param)), why))
        })
    }

    /// The same of a whole parameter.
    fn write_whole(
        &self,
        py: Python<'_>,
        call: (&str, usize),
        values: &Given<'_>,
        write: impl Send + FnOnce(&mut oxizero::Engine, View<'_>) -> Result<(), EngineError>,
    ) -> PyResult<()> {
        let shape = self.shape(py, call.1)?;
        self.write(py, call, (values, Some(shape)), write)
    }
}

/// A copy of what the engine shows: the tensor outlives the call.
fn copied(local: Option<Local<'_>>) -> Option<(usize, Buffer)> {
    let local = local?;
    Some((local.elements.start, Buffer::copy_of(local.values())))
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
    fn set_full_grad(&self, py: Python<'_>, param: usize, values: Given<'_>) -> PyResult<()> {
        self.write_whole(py, ("set_full_grad", param), &values, |engine, values| {
            engine.set_full_grad(ParamId(param), values)
        })
    }

    /// All gradients, by parameter; a collective for each group of parameters, and where whole
    /// tensors are asked for of which ranks hold parts, for those parts.
    fn full_grads(&self, py: Python<'_>, whole: bool) -> PyResult<GradTensors> {
        let scope = if whole { Scope::Global } else { Scope::DataParallel };
        let (grads, count) = self.run_inner(py, |inner| {
            let mut grads = inner.grads.take().and_then(Arc::into_inner).unwrap_or_default();
            inner.engine.full_grads_into(scope, &mut grads)?;
            Ok((grads, inner.engine.params().len()))
        })?;
        let (tensors, grads) = tensor::model_grads(py, grads, count)?;
        let inner = &mut *self.lock(py)?;
        (inner.grads, inner.grads_read) = (grads, true);
        Ok(tensors)
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
    fn set_local_grad(&self, py: Python<'_>, param: usize, values: Given<'_>) -> PyResult<()> {
        self.write(py, ("set_local_grad", param), (&values, None), |engine, values| {
            engine.set_local_grad(ParamId(param), values)
        })
    }

    /// Whole master weights; a collective call. `None` for a frozen parameter.
    fn full_param(&self, py: Python<'_>, param: usize) -> PyResult<Option<Py<PyAny>>> {
        self.whole(py, param, |engine| engine.full_param(ParamId(param)))
    }

    /// Replaces master and model weights; a collective call.
    fn set_full_param(&self, py: Python<'_>, param: usize, values: Given<'_>) -> PyResult<()> {
        self.write_whole(py, ("set_full_param", param), &values, |engine, values| {
            engine.set_full_param(ParamId(param), values)
        })
    }

    /// The part of the master weights that this rank updates.
    fn local_param(&self, py: Python<'_>, param: usize) -> PyResult<Option<Part>> {
        let copy = self.run(py, |engine| engine.local_param(ParamId(param)).map(copied))?;
        part(py, copy)
    }

    /// Replaces that part, and the model weights; a collective call.
    fn set_local_param(&self, py: Python<'_>, param: usize, values: Given<'_>) -> PyResult<()> {
        self.write(py, ("set_local_param", param), (&values, None), |engine, values| {
            engine.set_local_param(ParamId(param), values)
        })
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
        values: Given<'_>,
    ) -> PyResult<()> {
        let call = format!("set_full_state {key}");
        self.write_whole(py, (&call, param), &values, |engine, values| {
            engine.set_full_state(ParamId(param), key, values)
        })
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
        values: Given<'_>,
    ) -> PyResult<()> {
        let call = format!("set_local_state {key}");
        self.write(py, (&call, param), (&values, None), |engine, values| {
            engine.set_local_state(ParamId(param), key, values)
        })
    }
}
