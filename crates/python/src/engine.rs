//! The engine as a Python class.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oxizero::comm::Communicator;
use oxizero::{
    Boundary, Buffer, DType, EngineError, EngineOptions, GradIn, LossScale, ModelGrads, Norm,
    Numel, ParamId, Rank, StepOutcome,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrangement::{Arrangement, alike};
use crate::config::Config;
use crate::error::{self, raised};
use crate::optimizer::Group;
use crate::setup::{self, Param, World};
use crate::tensor::{self, Tensor};

/// One rank's engine. Calls that wait for other ranks release the interpreter's lock.
#[pyclass(frozen, module = "oxizero._oxizero")]
pub(crate) struct Engine {
    inner: Mutex<Inner>,
}

pub(crate) struct Inner {
    pub(crate) engine: oxizero::Engine,
    /// The optimizer's groups as they were last told.
    groups: Vec<Group>,
    /// The gradients that were read last, whose memory serves again once nobody else holds them.
    pub(crate) grads: Option<Arc<ModelGrads>>,
    /// Whether they are this window's.
    pub(crate) grads_read: bool,
}

impl Inner {
    /// Keeps memory for the next read only for those who read each window.
    fn window_ended(&mut self) {
        if !std::mem::take(&mut self.grads_read) {
            self.grads = None;
        }
    }
}

impl Engine {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic in an earlier call leaves the engine's own checks in place.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the engine, without the interpreter's lock.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        deed: impl Send + FnOnce(&mut oxizero::Engine) -> Result<T, EngineError>,
    ) -> PyResult<T> {
        py.detach(|| deed(&mut self.lock().engine)).map_err(raised)
    }

    /// The shape of a parameter that the engine knows.
    pub(crate) fn shape(&self, param: usize) -> Vec<usize> {
        self.lock().engine.params().get(param).map(|spec| spec.shape.clone()).unwrap_or_default()
    }
}

#[pymethods]
impl Engine {
    /// Makes this rank's part; a collective call. Weights are rank 0's.
    #[new]
    fn new(
        py: Python<'_>,
        config: &Config,
        world: World,
        arrangement: &Arrangement,
        params: Vec<Param<'_>>,
        groups: Vec<Group>,
    ) -> PyResult<Self> {
        let specs = setup::specs(&params, &arrangement.inner)?;
        let options = setup::options(&config.0, &specs).map_err(error::config)?;
        let options = EngineOptions { mesh: Some(arrangement.inner.mesh().clone()), ..options };
        let optimizer = setup::optimizer(&groups)?;
        let initial = setup::initial(&params)?;
        let engine = py.detach(|| {
            let comm = world.connect_for(config.0.copies)?;
            let mut write = |param: ParamId, weights: &mut [f32]| {
                setup::write_initial(&initial, param, weights);
            };
            oxizero::Engine::new(specs, vec![], options, optimizer, comm, &mut write)
                .map_err(raised)
        });
        let mut engine = engine?;
        for (index, group) in groups.iter().enumerate() {
            group.apply(&mut engine, index, None)?;
        }
        Ok(Self { inner: Mutex::new(Inner { engine, groups, grads: None, grads_read: false }) })
    }

    /// The memory of a parameter's model weights.
    fn weights(&self, py: Python<'_>, param: usize) -> PyResult<Py<PyAny>> {
        let lent = self.run(py, |engine| engine.lend_weights(ParamId(param)))?;
        tensor::weights(py, lent)
    }

    /// The parameter's weights were written; the master weights follow.
    fn take_over_weights(&self, py: Python<'_>, param: usize) -> PyResult<()> {
        self.run(py, |engine| engine.take_over_weights(ParamId(param)))
    }

    /// Takes a gradient that was multiplied by `loss_scale`.
    fn grad_ready(
        &self,
        py: Python<'_>,
        param: usize,
        grad: Tensor<'_>,
        loss_scale: f32,
    ) -> PyResult<()> {
        let loss_scale = LossScale::new(loss_scale).map_err(error::config)?;
        let grad = GradIn { values: grad.view()?, loss_scale };
        self.run(py, |engine| engine.grad_ready(ParamId(param), grad))
    }

    /// The pass has no more gradients.
    fn backward_end(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, oxizero::Engine::backward_end)
    }

    /// Ends the micro-batch and, at the boundary, updates the weights; says what happened.
    fn step<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let outcome = self.run(py, oxizero::Engine::step)?;
        if !matches!(outcome, StepOutcome::Accumulated { .. }) {
            self.lock().window_ended();
        }
        let told = PyDict::new(py);
        let kind = match outcome {
            StepOutcome::Accumulated { n, of } => {
                told.set_item("n", n)?;
                told.set_item("of", of)?;
                "accumulated"
            }
            StepOutcome::Applied { norm_before, norm_after } => {
                told.set_item("norm_before", norm_before)?;
                told.set_item("norm_after", norm_after)?;
                "applied"
            }
            StepOutcome::Skipped { reason, parameter, rank } => {
                told.set_item("reason", format!("{reason:?}"))?;
                told.set_item("parameter", parameter)?;
                told.set_item("rank", rank.0)?;
                "skipped"
            }
        };
        told.set_item("kind", kind)?;
        Ok(told)
    }

    /// Gives up the window's gradients.
    fn discard_window(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, oxizero::Engine::discard_window)
    }

    /// Clips the window's gradients, and returns their norm before; a collective call.
    fn clip_grads(&self, py: Python<'_>, max_norm: f64, norm_type: f64) -> PyResult<f64> {
        let norm = match norm_type {
            1.0 => Norm::One,
            2.0 => Norm::Two,
            3.0 => Norm::Three,
            f64::INFINITY => Norm::Infinity,
            other => {
                let why = format!("norm_type = {other}; there are 1, 2, 3 and inf");
                return Err(PyValueError::new_err(why));
            }
        };
        self.run(py, |engine| engine.clip_grads(max_norm, norm))
    }

    /// Whether all ranks of the machine have one copy of the model weights.
    #[getter]
    fn shares_weights(&self) -> bool {
        self.lock().engine.shares_weights()
    }

    /// Whether gradients are reduced as they come.
    fn set_grad_sync(&self, py: Python<'_>, sync: bool) -> PyResult<()> {
        self.run(py, |engine| engine.set_grad_sync(sync))
    }

    /// Which steps end the window: those that the configuration says (`None`), the next ones, or
    /// none.
    #[pyo3(signature = (is_boundary))]
    fn set_boundary(&self, is_boundary: Option<bool>) {
        let boundary = match is_boundary {
            None => Boundary::Counted,
            Some(true) => Boundary::Now,
            Some(false) => Boundary::Later,
        };
        self.lock().engine.set_boundary(boundary);
    }

    /// What the losses of this window are to be multiplied by.
    #[getter]
    fn loss_scale(&self) -> f32 {
        self.lock().engine.loss_scale().get()
    }

    /// Steps that were applied.
    #[getter]
    fn applied_steps(&self) -> u64 {
        self.lock().engine.applied_steps()
    }

    /// The dtypes on the gradients' way, as text.
    #[getter]
    fn gradient_paths(&self) -> Vec<String> {
        self.lock().engine.gradient_paths().iter().map(ToString::to_string).collect()
    }

    /// Bytes that this rank holds now, by role.
    #[getter]
    fn memory(&self) -> Vec<(&'static str, usize)> {
        let roles = self.lock().engine.memory().roles();
        roles.map(|(role, bytes)| (role, bytes.0)).to_vec()
    }

    /// The most bytes that this rank held at one moment.
    #[getter]
    fn peak_memory(&self) -> usize {
        self.lock().engine.peak_memory_total().0
    }

    /// Tells the optimizer's groups, as they are from the next step on.
    fn set_groups(&self, groups: Vec<Group>) -> PyResult<()> {
        let inner = &mut *self.lock();
        if groups.len() != inner.groups.len() {
            let (was, is) = (inner.groups.len(), groups.len());
            let why = format!("an optimizer of {was} groups has {is}; make a new engine");
            return Err(PyValueError::new_err(why));
        }
        for (index, group) in groups.iter().enumerate() {
            group.apply(&mut inner.engine, index, inner.groups.get(index))?;
        }
        inner.groups = groups;
        Ok(())
    }

    /// Waits for all ranks.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |engine| Ok(engine.communicator().barrier()?))
    }

    /// Overwrites tensors of any dtype with those of a rank that holds the same of every parameter:
    /// the `root`-th of these ranks; a collective call.
    #[pyo3(signature = (tensors, root = 0))]
    fn broadcast(&self, py: Python<'_>, mut tensors: Vec<Tensor<'_>>, root: usize) -> PyResult<()> {
        let len: usize = tensors.iter().map(|tensor| tensor.bytes().len()).sum();
        let numel = Numel(len.div_ceil(DType::F32.size()));
        let mut packed = Buffer::heap(numel, DType::F32);
        let mut end = 0;
        for tensor in &tensors {
            let bytes = tensor.bytes();
            packed.region_mut().range_mut(end..end + bytes.len()).copy_from_slice(bytes);
            end += bytes.len();
        }
        let root = Rank(root);
        let packed = self.run(py, |engine| broadcast(alike(engine)?.comm(), packed, root))?;
        let mut rest = packed.region().bytes();
        for tensor in &mut tensors {
            let (bytes, others) = rest.split_at(tensor.bytes().len());
            tensor.bytes_mut().copy_from_slice(bytes);
            rest = others;
        }
        Ok(())
    }
}

fn broadcast(comm: &dyn Communicator, packed: Buffer, root: Rank) -> Result<Buffer, EngineError> {
    Ok(comm.broadcast(packed, root)?.wait()?)
}
