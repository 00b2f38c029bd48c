//! Files of a model's weights, which one rank writes.

use std::collections::HashMap;
use std::path::PathBuf;

use oxizero::checkpoints::{TensorBytes, write_tensors};
use pyo3::prelude::*;

use crate::checkpoint::{Given, stored_dtype};
use crate::engine::Engine;
use crate::error::raised;

/// Writes tensors to a safetensors file, with what it says beside them.
#[pyfunction]
pub(crate) fn write_safetensors(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<Given<'_>>,
    entries: HashMap<String, String>,
) -> PyResult<()> {
    let tensors = tensors.iter().map(tensor).collect::<PyResult<Vec<_>>>()?;
    let written = py.detach(|| write_tensors(&path, &tensors, &entries));
    written.map_err(|error| raised(error.into()))
}

fn tensor<'a>((name, dtype, shape, values): &'a Given<'_>) -> PyResult<TensorBytes<'a>> {
    let dtype = stored_dtype(name, dtype)?;
    Ok(TensorBytes { name, dtype, shape, bytes: values.bytes() })
}

#[pymethods]
impl Engine {
    /// The first parameter of which ranks hold parts, or tensors of their own.
    #[getter]
    fn first_in_parts(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.run(py, |engine| {
            let mesh = engine.mesh();
            let is_in_parts = |spec: &&oxizero::ParamSpec| !mesh.sharing(spec).parts().is_empty();
            Ok(engine.params().iter().find(is_in_parts).map(|spec| spec.name.clone()))
        })
    }

    /// The first rank on which something was not `fine`; a collective call.
    fn first_failed(&self, py: Python<'_>, call: &str, fine: bool) -> PyResult<Option<usize>> {
        let told =
            self.run(py, |engine| Ok(engine.communicator().exchange(call, &[u8::from(fine)])?))?;
        Ok(told.iter().position(|rank| rank[0] == 0))
    }
}
