//! Checkpoints of the engine, with what Python adds.

use std::path::PathBuf;

use oxizero::checkpoints::{Dtype, Role, Tensor as StoredTensor, Value};
use oxizero::{LoadOptions, Loaded, Names, Rank, RunFolder, SaveOptions, StoredBuffer, What};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::engine::Engine;
use crate::error::raised;
use crate::tensor::Tensor;

/// A buffer: its name, torch's name of its dtype, its shape, and its elements as bytes.
pub(crate) type Given<'py> = (String, String, Vec<usize>, Tensor<'py>);

/// Names of dtypes: torch's, and those in files.
const DTYPES: [(&str, Dtype); 12] = [
    ("bool", Dtype::BOOL),
    ("uint8", Dtype::U8),
    ("int8", Dtype::I8),
    ("int16", Dtype::I16),
    ("int32", Dtype::I32),
    ("int64", Dtype::I64),
    ("float16", Dtype::F16),
    ("bfloat16", Dtype::BF16),
    ("float32", Dtype::F32),
    ("float64", Dtype::F64),
    ("float8_e4m3fn", Dtype::F8_E4M3),
    ("float8_e5m2", Dtype::F8_E5M2),
];

/// How files call torch's dtype, which the tensor `name` has.
pub(crate) fn stored_dtype(name: &str, dtype: &str) -> PyResult<Dtype> {
    let known = DTYPES.iter().find(|(known, _)| *known == dtype);
    known.map(|(_, dtype)| *dtype).ok_or_else(|| {
        let why = format!("`{name}` is {dtype}, which safetensors files do not hold");
        PyValueError::new_err(why)
    })
}

fn stored((name, dtype, shape, values): &Given<'_>) -> PyResult<StoredBuffer> {
    let dtype = stored_dtype(name, dtype)?;
    let (name, shape, bytes) = (name.clone(), shape.clone(), values.bytes().to_vec());
    Ok(StoredBuffer { name, shape, dtype, bytes })
}

fn json(text: &str) -> PyResult<Value> {
    let read = text.parse::<Value>();
    read.map_err(|error| PyValueError::new_err(format!("what is to be saved is no JSON: {error}")))
}

/// What was loaded, for Python.
fn told<'py>(py: Python<'py>, rank: Rank, loaded: Loaded) -> PyResult<Bound<'py, PyDict>> {
    let Loaded { mut checkpoint, missing, unexpected } = loaded;
    let told = PyDict::new(py);
    told.set_item("folder", checkpoint.folder())?;
    told.set_item("missing", missing)?;
    told.set_item("unexpected", unexpected)?;
    told.set_item("caller", checkpoint.manifest().caller.to_string())?;
    let ranks = &checkpoint.manifest().ranks;
    told.set_item("ranks", ranks.len())?;
    told.set_item("own", ranks.get(rank.0).map(Value::to_string))?;
    let groups = &checkpoint.manifest().training.groups;
    let groups: Vec<_> = groups.iter().map(|group| (group.lr, group.weight_decay)).collect();
    told.set_item("groups", groups)?;
    let is_buffer = |tensor: &StoredTensor| tensor.role == Role::Buffer;
    let tensors = checkpoint.manifest().tensors.clone();
    let buffers = PyDict::new(py);
    for (index, tensor) in tensors.iter().enumerate().filter(|(_, tensor)| is_buffer(tensor)) {
        let bytes = checkpoint.read_whole(index).map_err(|error| raised(error.into()))?;
        let name = DTYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype);
        let name = name.map_or_else(|| tensor.dtype.to_string(), |(name, _)| (*name).into());
        buffers.set_item(&tensor.name, (name, &tensor.shape, PyBytes::new(py, &bytes)))?;
    }
    told.set_item("buffers", buffers)?;
    Ok(told)
}

#[pymethods]
impl Engine {
    /// Writes a checkpoint with the model's buffers and what the caller says, as JSON: what is the
    /// same on all ranks, and what is each rank's own; a collective call.
    fn save_checkpoint(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        name: String,
        says: (String, String),
        buffers: Vec<Given<'_>>,
    ) -> PyResult<()> {
        let (caller, own) = (json(&says.0)?, json(&says.1)?);
        let buffers = buffers.iter().map(stored).collect::<PyResult<_>>()?;
        let name = Some(name);
        let options = SaveOptions { name, caller, own, buffers, ..SaveOptions::default() };
        self.run(py, |engine| engine.save(&RunFolder::new(folder), &options).map(drop))
    }

    /// Loads `all` of a checkpoint, or its `weights`; the latest without a name. A collective call.
    #[pyo3(signature = (folder, name, what, strict))]
    fn load_checkpoint<'py>(
        &self,
        py: Python<'py>,
        folder: PathBuf,
        name: Option<String>,
        what: &str,
        strict: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let what = match what {
            "all" => What::All,
            "weights" => What::Weights,
            other => return Err(PyValueError::new_err(format!("what = {other}"))),
        };
        let options =
            LoadOptions { what, names: if strict { Names::Strict } else { Names::Listed } };
        let (rank, loaded) = self.run(py, |engine| {
            let loaded = engine.load(&RunFolder::new(folder), name.as_deref(), options)?;
            Ok((engine.communicator().rank(), loaded))
        })?;
        told(py, rank, loaded)
    }
}
