//! Checkpoints of what Python has read from other formats.

use std::path::PathBuf;

use oxizero::checkpoints::{CheckpointError, Manifest, write_whole};
use oxizero::{EngineError, RunFolder};
use pyo3::prelude::*;

use crate::error::raised;
use crate::tensor::Tensor;

/// Why a checkpoint was not written.
struct Stopped(PyErr);

impl From<CheckpointError> for Stopped {
    fn from(error: CheckpointError) -> Self {
        Self(raised(EngineError::from(error)))
    }
}

impl From<PyErr> for Stopped {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

/// Writes the checkpoint `name` of whole tensors. `manifest` is its JSON without pieces and ranks;
/// `give` is called with the index of each of its tensors, and returns the elements. Returns the
/// checkpoint's folder.
#[pyfunction]
pub(crate) fn write_checkpoint(
    py: Python<'_>,
    folder: PathBuf,
    name: &str,
    manifest: &str,
    give: Py<PyAny>,
) -> PyResult<PathBuf> {
    let mut given = |tensor: usize| {
        Python::attach(|py| {
            let capsule = give.bind(py).call1((tensor,))?;
            let tensor: Tensor<'_> = capsule.extract()?;
            Ok(tensor.bytes().to_vec())
        })
    };
    let written = py.detach(|| {
        let manifest = Manifest::from_json(manifest)?;
        write_whole(&RunFolder::new(folder), name, manifest, &mut given)
    });
    written.map_err(|Stopped(error)| error)
}
