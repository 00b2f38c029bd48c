//! The engine as a Python class.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use oxizero::comm::Communicator;
use oxizero::{
    Backend, Boundary, Buffer, DType, EngineError, EngineOptions, GradIn, LossScale, ModelGrads,
    Norm, Numel, Observer, ParamId, Rank, StepOutcome, Trace, ViewMut, WorldSize,
};
use oxizero_device::kernels::cast;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrangement::Arrangement;
use crate::config::Config;
use crate::error::{self, raised};
use crate::given::Given;
use crate::one_call::{Held, OneCall};
use crate::optimizer::{Group, Rules};
use crate::process::OfProcess;
use crate::setup::{self, Param};
use crate::tensor::{self, Tensor};
use crate::world::World;

/// One rank's engine. Calls that wait for other ranks release the interpreter's lock.
#[pyclass(frozen, module = "oxizero._oxizero")]
pub(crate) struct Engine {
    inner: OfProcess<OneCall<Inner>>,
    back_end: Py<PyAny>,
}

pub(crate) struct Inner {
    pub(crate) engine: oxizero::Engine,
    /// The optimizer's groups as they were last told.
    groups: Vec<Group>,
    rules: Rules,
    /// With what a call first unwound that was in the middle of something: nothing works after it.
    lost: Option<String>,
    /// The gradients that were read last, whose memory serves again once nobody else holds them.
    pub(crate) grads: Option<Arc<ModelGrads>>,
    /// Whether they are this window's.
    pub(crate) grads_read: bool,
}

impl Inner {
    /// Gives up what a call left in the middle, and tells the others, who may wait.
    fn lose(&mut self, why: String) {
        self.engine.communicator().abort(&why);
        self.lost = Some(why);
    }

    /// Refuses to go on with an engine that was left in the middle of a call.
    fn check_alive(&self) -> PyResult<()> {
        self.lost.as_deref().map_or(Ok(()), |why| Err(error::lost(why)))
    }

    /// Keeps memory for the next read only for those who read each window.
    fn window_ended(&mut self) {
        if !std::mem::take(&mut self.grads_read) {
            self.grads = None;
        }
    }
}

impl Engine {
    /// Looks at the engine. Like every use, it is refused in a fork, and in the middle of a call
    /// of the same thread.
    pub(crate) fn lock(&self, py: Python<'_>) -> PyResult<Held<'_, Inner>> {
        self.inner.here()?.hold_attached(py)
    }

    /// Does something with the engine, without the interpreter's lock.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        deed: impl Send + FnOnce(&mut oxizero::Engine) -> Result<T, EngineError>,
    ) -> PyResult<T> {
        self.run_inner(py, |inner| deed(&mut inner.engine))
    }

    /// The same, with what else is kept beside the engine.
    pub(crate) fn run_inner<T: Send>(
        &self,
        py: Python<'_>,
        deed: impl Send + FnOnce(&mut Inner) -> Result<T, EngineError>,
    ) -> PyResult<T> {
        py.detach(|| {
            let mut inner = self.inner.here()?.hold()?;
            inner.check_alive()?;
            match catch_unwind(AssertUnwindSafe(|| deed(&mut inner))) {
                Ok(result) => result.map_err(raised),
                Err(payload) => {
                    inner.lose(reason(&*payload));
                    Err(exception(payload))
                }
            }
        })
    }

    /// The shape of a parameter that the engine knows.
    pub(crate) fn shape(&self, py: Python<'_>, param: usize) -> PyResult<Vec<usize>> {
        let inner = self.lock(py)?;
        Ok(inner.engine.params().get(param).map(|spec| spec.shape.clone()).unwrap_or_default())
    }
}

#[pymethods]
impl Engine {
    /// Makes this rank's part; a collective call. Weights are rank 0's. What this rank refuses by
    /// itself it does before it calls `meet`, where ranks tell each other.
    #[new]
    fn new(
        py: Python<'_>,
        said: (PyRef<'_, Config>, PyRef<'_, Arrangement>),
        back_end: Py<PyAny>,
        params: Vec<Param<'_>>,
        groups: Vec<Group>,
        meet: Py<PyAny>,
    ) -> PyResult<Self> {
        let (config, arrangement) = said;
        let specs = setup::specs(&params, &arrangement.inner)?;
        let options = setup::options(&config.0, &specs).map_err(error::config)?;
        let options = EngineOptions { mesh: Some(arrangement.inner.mesh().clone()), ..options };
        let initial = setup::initial(&params)?;
        groups.iter().try_for_each(Group::check)?;
        let name: String = back_end.bind(py).getattr("name")?.extract()?;
        setup::check_copies(&config.0, &name).map_err(error::config)?;
        meet.call0(py)?;

        let world: World = back_end.bind(py).getattr("world")?.extract()?;
        let rules = world.rules(py);
        let optimizer = setup::optimizer(&groups, &rules)?;
        let (copies, overlap) = (config.0.copies, config.0.overlap);
        let (path, place) = (config.0.trace.clone(), world.place()?);
        let engine = py.detach(|| {
            let backend = world.connect_for(copies, overlap)?;
            // Whom this fails leaves the others, who know it.
            let observer = path.map(|path| trace(&path, place)).transpose()?;
            let backend = Backend { observer, ..backend };
            let mut write = |param: ParamId, weights: ViewMut<'_>| {
                // What has no initial weights starts from zeros.
                if let Some(initial) = initial[param.0] {
                    cast(initial, weights);
                }
            };
            let make = || {
                oxizero::Engine::on_backend(specs, vec![], options, optimizer, backend, &mut write)
            };
            caught(make)?.map_err(raised)
        });
        let mut engine = engine?;
        for (index, group) in groups.iter().enumerate() {
            group.apply(&mut engine, index, None, &rules)?;
        }
        let (grads, grads_read, lost) = (None, false, None);
        let inner = Inner { engine, groups, rules, lost, grads, grads_read };
        Ok(Self { inner: OfProcess::new(OneCall::new(inner)), back_end })
    }

    /// What Python gave it to run on.
    #[getter]
    fn back_end(&self, py: Python<'_>) -> Py<PyAny> {
        self.back_end.clone_ref(py)
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
        grad: Given<'_>,
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

    /// Takes part in the others' step, which this rank refuses.
    fn refuse_step(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, oxizero::Engine::refuse_step)
    }

    /// Ends the micro-batch and, at the boundary, updates the weights; says what happened.
    fn step<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let outcome = self.run(py, oxizero::Engine::step)?;
        if !matches!(outcome, StepOutcome::Accumulated { .. }) {
            self.lock(py)?.window_ended();
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
            StepOutcome::Skipped { parameter, rank, .. } => {
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
                self.refuse(py, "clip_grads", why.clone())?;
                return Err(PyValueError::new_err(why));
            }
        };
        self.run(py, |engine| engine.clip_grads(max_norm, norm))
    }

    /// Whether all ranks of the machine have one copy of the model weights.
    #[getter]
    fn shares_weights(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.lock(py)?.engine.shares_weights())
    }

    /// Whether gradients are reduced as they come.
    fn set_grad_sync(&self, py: Python<'_>, sync: bool) -> PyResult<()> {
        self.run(py, |engine| engine.set_grad_sync(sync))
    }

    /// Which steps end the window: those that the configuration says (`None`), the next ones, or
    /// none.
    #[pyo3(signature = (is_boundary))]
    fn set_boundary(&self, py: Python<'_>, is_boundary: Option<bool>) -> PyResult<()> {
        let boundary = match is_boundary {
            None => Boundary::Counted,
            Some(true) => Boundary::Now,
            Some(false) => Boundary::Later,
        };
        let mut inner = self.lock(py)?;
        inner.check_alive()?;
        inner.engine.set_boundary(boundary);
        Ok(())
    }

    /// What the losses of this window are to be multiplied by.
    #[getter]
    fn loss_scale(&self, py: Python<'_>) -> PyResult<f32> {
        Ok(self.lock(py)?.engine.loss_scale().get())
    }

    /// Steps that were applied.
    #[getter]
    fn applied_steps(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.lock(py)?.engine.applied_steps())
    }

    /// The dtypes on the gradients' way, as text.
    #[getter]
    fn gradient_paths(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        Ok(self.lock(py)?.engine.gradient_paths().iter().map(ToString::to_string).collect())
    }

    /// Bytes that this rank holds now, by role.
    #[getter]
    fn memory(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, usize)>> {
        let roles = self.lock(py)?.engine.memory().roles();
        Ok(roles.map(|(role, bytes)| (role, bytes.0)).to_vec())
    }

    /// The most bytes that this rank held at one moment.
    #[getter]
    fn peak_memory(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.lock(py)?.engine.peak_memory_total().0)
    }

    /// Collectives that moved tensors so far, and small exchanges.
    #[getter]
    fn collectives(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        let traffic = self.run(py, |engine| Ok(engine.traffic()))?;
        Ok((traffic.collectives, traffic.exchanges))
    }

    /// Tells the optimizer's groups, as they are from the next step on.
    fn set_groups(&self, py: Python<'_>, groups: Vec<Group>) -> PyResult<()> {
        let inner = &mut *self.lock(py)?;
        inner.check_alive()?;
        if groups.len() != inner.groups.len() {
            let (was, is) = (inner.groups.len(), groups.len());
            let why = format!("an optimizer of {was} groups has {is}; make a new engine");
            return Err(PyValueError::new_err(why));
        }
        let engine = &mut inner.engine;
        let mut told = groups.iter().zip(&inner.groups).enumerate();
        let all = told
            .try_for_each(|(index, (is, was))| is.apply(engine, index, Some(was), &inner.rules));
        if let Err(refused) = all {
            // All or none: groups before the one that is refused become what they were.
            for (index, was) in inner.groups.iter().enumerate() {
                was.apply(engine, index, None, &inner.rules)?;
            }
            return Err(refused);
        }
        inner.groups = groups;
        Ok(())
    }

    /// Waits for what runs beside the caller's work.
    fn settle(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let inner = self.inner.here()?.hold()?;
            // To count what was issued is to wait for it.
            caught(|| inner.engine.communicator().traffic()).map(drop)
        })
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
        let packed = self.run(py, |engine| broadcast(engine.alike().1, packed, root))?;
        let mut rest = packed.region().bytes();
        for tensor in &mut tensors {
            let (bytes, others) = rest.split_at(tensor.bytes().len());
            tensor.bytes_mut().copy_from_slice(bytes);
            rest = others;
        }
        Ok(())
    }

    /// The same of one tensor in torch's hands.
    fn broadcast_given(&self, py: Python<'_>, tensor: Given<'_>, root: usize) -> PyResult<()> {
        let (buffer, root) = (tensor.into_buffer()?, Rank(root));
        self.run(py, |engine| broadcast(engine.alike().1, buffer, root).map(drop))
    }
}

/// Who writes what this rank does, if the configuration asks for it.
fn trace(path: &str, (rank, size): (Rank, WorldSize)) -> PyResult<Arc<dyn Observer>> {
    Ok(Arc::new(Trace::create(path.as_ref(), rank, size)?))
}

fn broadcast(comm: &dyn Communicator, packed: Buffer, root: Rank) -> Result<Buffer, EngineError> {
    Ok(comm.broadcast(packed, root)?.wait()?)
}

/// What a call unwound with: an exception of torch's, or a panic.
pub(crate) fn reason(payload: &(dyn Any + Send)) -> String {
    let error = payload.downcast_ref::<PyErr>().map(PyErr::to_string);
    let text = || payload.downcast_ref::<String>().cloned();
    let literal = || payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    error.or_else(text).or_else(literal).unwrap_or_else(|| "a panic without words".into())
}

/// What the deed returns, or the exception with which an operation of torch unwound.
pub(crate) fn caught<T>(deed: impl FnOnce() -> T) -> PyResult<T> {
    // Whoever calls this gives up what was in the middle of something.
    catch_unwind(AssertUnwindSafe(deed)).map_err(exception)
}

/// The exception with which an operation of torch unwound; a panic goes on.
fn exception(payload: Box<dyn Any + Send>) -> PyErr {
    payload.downcast::<PyErr>().map_or_else(|payload| resume_unwind(payload), |error| *error)
}
