//! Weights that rest sharded, gathered into torch's memory, and what one rank writes to weights.

use oxizero::comm::CommError;
use oxizero::{BucketId, BucketSpec, EngineError, ParamId, Rank};
use oxizero_core::Overlap;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::config::torch_name;
use crate::engine::Engine;
use crate::given::Given;
use crate::{error, words};

fn told<'py>(py: Python<'py>, bucket: &BucketSpec) -> PyResult<Bound<'py, PyDict>> {
    let told = PyDict::new(py);
    let slots = bucket.params.iter().enumerate();
    let starts: Vec<_> =
        slots.map(|(slot, param)| (param.0, bucket.layout.slot(slot).start)).collect();
    told.set_item("params", starts)?;
    told.set_item("dtype", torch_name(bucket.dtype))?;
    told.set_item("numel", bucket.layout.padded_numel().0)?;
    told.set_item("trained", bucket.trainable)?;
    Ok(told)
}

/// What an error says that came in the turn of a bucket, whose first parameter is named; and what
/// to do where ranks may have come to other modules. It is not where another rank has ended.
fn in_turn(error: &EngineError, name: &str) -> String {
    let differs = matches!(
        error,
        EngineError::CallsDiffer { .. }
            | EngineError::Comm(
                CommError::Mismatch { .. }
                    | CommError::Unfilled { .. }
                    | CommError::Deadlock { .. }
                    | CommError::Timeout { .. }
            )
    );
    let advice = match differs {
        true => {
            "; a module that some ranks skip, or use parts of, is declared with \
             oxizero.utils.set_z3_leaf_modules, and every rank calls state_dict() and the like"
        }
        false => "",
    };
    let said = words::of(error);
    format!("{said} (in the turn of `{name}`{advice})")
}

impl Engine {
    /// Does something that ranks do together in a bucket's turn.
    fn in_turn_of(
        &self,
        py: Python<'_>,
        id: BucketId,
        deed: impl Send + FnOnce(&mut oxizero::Engine) -> Result<(), EngineError>,
    ) -> PyResult<()> {
        let done = self.run(py, |engine| {
            Ok(deed(engine).map_err(|error| {
                let first = engine.buckets().nth(id.0).and_then(|bucket| bucket.params.first());
                let name = first.map(|param| engine.params()[param.0].name.as_str());
                let words = in_turn(&error, name.unwrap_or_default());
                (error, words)
            }))
        })?;
        done.map_err(|(error, words)| error::told(&error, words))
    }
}

#[pymethods]
impl Engine {
    /// The buckets: each parameter and the element that it starts at, torch's name of the dtype,
    /// the elements of the whole, and whether it is trained.
    #[getter]
    fn buckets<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let inner = self.lock(py)?;
        inner.engine.buckets().map(|bucket| told(py, bucket)).collect()
    }

    /// Gathers a bucket's weights into a tensor of all its elements; a collective call.
    fn gather(&self, py: Python<'_>, bucket: usize, full: Given<'_>) -> PyResult<()> {
        let (id, buffer) = (BucketId(bucket), full.into_buffer()?);
        self.in_turn_of(py, id, |engine| engine.gather_into(id, buffer).map(drop))
    }

    /// Starts to gather them, until `finish_gather` or `let_go`; a collective call.
    fn start_gather(&self, py: Python<'_>, bucket: usize, full: Given<'_>) -> PyResult<()> {
        let (id, buffer) = (BucketId(bucket), full.into_buffer()?);
        self.in_turn_of(py, id, |engine| engine.start_gather(id, buffer))
    }

    /// Waits for what was started.
    fn finish_gather(&self, py: Python<'_>, bucket: usize) -> PyResult<()> {
        let id = BucketId(bucket);
        self.in_turn_of(py, id, |engine| engine.finish_gather(id).map(drop))
    }

    /// Whether gathers that are started go on beside what the caller does.
    #[getter]
    fn overlaps(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.lock(py)?.engine.overlap() == Overlap::On)
    }

    /// Whether nobody has written to a tensor that a bucket was gathered into.
    fn is_as_gathered(&self, py: Python<'_>, bucket: usize, full: Given<'_>) -> PyResult<bool> {
        let full = full.view()?;
        self.run(py, |engine| engine.is_as_gathered(BucketId(bucket), full))
    }

    /// The tensor that a bucket was gathered into holds its weights no longer.
    fn let_go(&self, py: Python<'_>, bucket: usize) -> PyResult<()> {
        self.run(py, |engine| engine.let_go(BucketId(bucket)))
    }

    /// The gathered weights were written; what this rank holds of them follows.
    fn take_over_gathered(&self, py: Python<'_>, bucket: usize, full: Given<'_>) -> PyResult<()> {
        let full = full.view()?;
        self.run(py, |engine| engine.take_over_gathered(BucketId(bucket), full))
    }

    /// Overwrites values of a parameter, or of its bucket, with those of the rank that counts where
    /// `rank` has the say; a collective call.
    fn broadcast_values(
        &self,
        py: Python<'_>,
        param: usize,
        values: Given<'_>,
        rank: usize,
    ) -> PyResult<()> {
        let (param, rank, values) = (ParamId(param), Rank(rank), values.into_buffer()?);
        self.run(py, |engine| engine.broadcast_values(param, values, rank).map(drop))
    }

    /// Whether this rank's values of a parameter count where `rank` has the say.
    fn is_source(&self, py: Python<'_>, param: usize, rank: usize) -> PyResult<bool> {
        self.run(py, |engine| engine.is_source(ParamId(param), Rank(rank)))
    }

    /// The bucket's gradients are complete when `grads_end` says so.
    fn await_grads_end(&self, py: Python<'_>, bucket: usize) -> PyResult<()> {
        self.run(py, |engine| engine.await_grads_end(BucketId(bucket)))
    }

    /// No more gradients of the bucket come in this pass.
    fn grads_end(&self, py: Python<'_>, bucket: usize) -> PyResult<()> {
        let id = BucketId(bucket);
        self.in_turn_of(py, id, |engine| engine.grads_end(id))
    }
}
