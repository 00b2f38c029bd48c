//! Checkpoints of the engine, with what Python adds.

use std::path::PathBuf;

use oxizero::checkpoints::{CheckpointError, Dtype, Role, Tensor as StoredTensor, Value};
use oxizero::{
    Checkpoint, EngineError, LoadOptions, Names, Rank, RunFolder, SaveOptions, StoredBuffer, What,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

use crate::engine::Engine;
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

/// What a rank gives to a checkpoint.
fn options(
    name: String,
    (caller, own): &(String, String),
    buffers: &[Given<'_>],
) -> PyResult<SaveOptions> {
    let buffers = buffers.iter().map(stored).collect::<PyResult<_>>()?;
    let (name, caller, own) = (Some(name), json(caller)?, json(own)?);
    Ok(SaveOptions { name, caller, own, buffers, ..SaveOptions::default() })
}

/// The tensors that are buffers, and their elements.
fn buffers(checkpoint: &mut Checkpoint) -> Result<Vec<(StoredTensor, Vec<u8>)>, EngineError> {
    let tensors = checkpoint.manifest().tensors.clone();
    let buffers = tensors.into_iter().enumerate().filter(|(_, is)| is.role == Role::Buffer);
    buffers.map(|(index, tensor)| Ok((tensor, checkpoint.read_whole(index)?))).collect()
}

/// What is in a checkpoint beside the engine's own, for Python.
fn told<'py>(
    py: Python<'py>,
    rank: Rank,
    checkpoint: &Checkpoint,
    buffers: &[(StoredTensor, Vec<u8>)],
) -> PyResult<Bound<'py, PyDict>> {
    let told = PyDict::new(py);
    told.set_item("folder", checkpoint.folder())?;
    told.set_item("caller", checkpoint.manifest().caller.to_string())?;
    let ranks = &checkpoint.manifest().ranks;
    told.set_item("ranks", ranks.len())?;
    told.set_item("own", ranks.get(rank.0).map(Value::to_string))?;
    let groups = &checkpoint.manifest().training.groups;
    let groups: Vec<_> = groups.iter().map(|group| (group.lr, group.weight_decay)).collect();
    told.set_item("groups", groups)?;
    let of_buffers = PyDict::new(py);
    for (tensor, bytes) in buffers {
        let name = DTYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype);
        let name = name.map_or_else(|| tensor.dtype.to_string(), |(name, _)| (*name).into());
        let values = PyByteArray::new(py, bytes);
        of_buffers.set_item(&tensor.name, (name, &tensor.shape, values))?;
    }
    told.set_item("buffers", of_buffers)?;
    Ok(told)
}

/// What the engine is told of a checkpoint that Python has refused; the caller hears Python.
fn unwanted(why: String) -> EngineError {
    let tensor = "what is beside the weights".into();
    CheckpointError::Asked { tensor, problem: why }.into()
}

#[pymethods]
impl Engine {
    /// Writes a checkpoint with the model's buffers and what the caller says, as JSON: what is the
    /// same on all ranks, of which rank 0's is kept, and what is each rank's own; a collective
    /// call.
    fn save_checkpoint(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        name: String,
        says: (String, String),
        buffers: Vec<Given<'_>>,
    ) -> PyResult<()> {
        match options(name, &says, &buffers) {
            Ok(options) => {
                let run = RunFolder::new(folder);
                self.run(py, |engine| engine.save(&run, &options).map(drop))
            }
            Err(error) => {
                self.refuse(py, "save", error.to_string())?;
                Err(error)
            }
        }
    }

    /// Takes part in the collective `call` that this rank refuses, so that the others hear of it;
    /// why, the caller says. An error if they do not.
    pub(crate) fn refuse(&self, py: Python<'_>, call: &str, why: String) -> PyResult<()> {
        let why = EngineError::Param { param: String::new(), problem: why };
        self.run(py, |engine| match engine.refuse(call, None, why) {
            EngineError::Param { .. } => Ok(()),
            other => Err(other),
        })
    }

    /// The name of the latest checkpoint; a collective call.
    fn latest_checkpoint(&self, py: Python<'_>, folder: PathBuf) -> PyResult<Option<String>> {
        self.run(py, |engine| engine.latest_checkpoint(&RunFolder::new(folder)))
    }

    /// Loads `all` of a checkpoint, or its `weights`; a collective call. `check` is given what
    /// else is in it, and raises where that is refused: then nothing is loaded, on any rank.
    /// `how` says what, and whether names are to be the same.
    fn load_checkpoint(
        &self,
        py: Python<'_>,
        folder: PathBuf,
        name: &str,
        how: (String, bool),
        check: Py<PyAny>,
    ) -> PyResult<()> {
        let what = match how.0.as_str() {
            "all" => What::All,
            "weights" => What::Weights,
            other => return Err(PyValueError::new_err(format!("what = {other}"))),
        };
        let options =
            LoadOptions { what, names: if how.1 { Names::Strict } else { Names::Listed } };
        let mut refused = None;
        let loaded = self.run(py, |engine| {
            let rank = engine.communicator().rank();
            let mut check = |checkpoint: &mut Checkpoint| {
                let buffers = buffers(checkpoint)?;
                let checked = Python::attach(|py| {
                    check.call1(py, (told(py, rank, checkpoint, &buffers)?,)).map(drop)
                });
                checked.map_err(|error| {
                    let why = error.to_string();
                    refused = Some(error);
                    unwanted(why)
                })
            };
            engine.load_checked(&RunFolder::new(folder), Some(name), options, &mut check)
        });
        loaded.map(drop).map_err(|error| refused.unwrap_or(error))
    }
}
