//! Tensors that Python gives: on the CPU as DLPack capsules, on torch's back end as what its
//! `give` makes of them.

use oxizero::{Buffer, View};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::config::dtype;
use crate::tensor::Tensor;
use crate::torch;

/// A tensor, for the length of a call.
pub(crate) enum Given<'py> {
    /// On the CPU.
    Capsule(Tensor<'py>),
    /// In torch's hands: a buffer in its memory.
    Torch(Buffer, Vec<usize>),
    /// The same, of a dtype that the engine does not know, by torch's name of it.
    Unknown(String),
}

/// The operations of its device, the tensor as flat bytes, torch's name of its dtype, and its
/// shape.
type Parts<'py> = (Py<PyAny>, Bound<'py, PyAny>, String, Vec<usize>);

impl<'py> FromPyObject<'_, 'py> for Given<'py> {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok((operations, bytes, name, shape)) = given.extract::<Parts<'py>>() else {
            return given.extract().map(Self::Capsule);
        };
        match dtype(&name) {
            Ok(dtype) => {
                torch::given(operations, bytes, dtype).map(|buffer| Self::Torch(buffer, shape))
            }
            Err(_) => Ok(Self::Unknown(name)),
        }
    }
}

impl Given<'_> {
    /// The elements, of a dtype that the engine knows.
    pub(crate) fn view(&self) -> PyResult<View<'_>> {
        match self {
            Self::Capsule(tensor) => tensor.view(),
            Self::Torch(buffer, _) => Ok(buffer.view()),
            Self::Unknown(name) => Err(unknown(name)),
        }
    }

    /// The tensor's shape.
    pub(crate) fn shape(&self) -> Vec<usize> {
        match self {
            Self::Capsule(tensor) => tensor.shape().to_vec(),
            Self::Torch(_, shape) => shape.clone(),
            Self::Unknown(_) => Vec::new(),
        }
    }

    /// The elements as memory that a collective fills.
    pub(crate) fn into_buffer(self) -> PyResult<Buffer> {
        match self {
            Self::Capsule(tensor) => tensor.buffer(),
            Self::Torch(buffer, _) => Ok(buffer),
            Self::Unknown(name) => Err(unknown(&name)),
        }
    }
}

fn unknown(name: &str) -> PyErr {
    let why = format!("a tensor of {name}; the engine takes float32, bfloat16 and float16");
    PyTypeError::new_err(why)
}
