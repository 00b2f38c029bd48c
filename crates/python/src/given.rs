//! Tensors that Python gives: on the CPU as DLPack capsules, on torch's back end as what its
//! `give` makes of them.

use oxizero::{Buffer, View};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::config::dtype;
use crate::tensor::Tensor;
use crate::torch;

/// A tensor, for the length of a call.
pub(crate) enum Given<'py> {
    /// On the CPU.
    Capsule(Tensor<'py>),
    /// In torch's hands: a buffer in its memory.
    Torch(Buffer, Vec<usize>),
    /// What the engine does not take, and why. It is refused where it is used: in a collective
    /// call the other ranks are to hear of it.
    Refused(String),
}

/// The operations of its device, the tensor as flat bytes, torch's name of its dtype, and its
/// shape.
type Parts<'py> = (Py<PyAny>, Bound<'py, PyAny>, String, Vec<usize>);

impl<'py> FromPyObject<'_, 'py> for Given<'py> {
    type Error = PyErr;

    fn extract(given: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok((operations, bytes, name, shape)) = given.extract::<Parts<'py>>() else {
            return Ok(capsule(given).unwrap_or_else(Self::Refused));
        };
        match dtype(&name) {
            Ok(dtype) => {
                torch::given(operations, bytes, dtype).map(|buffer| Self::Torch(buffer, shape))
            }
            Err(_) => {
                let takes = "the engine takes float32, bfloat16 and float16";
                Ok(Self::Refused(format!("a tensor of {name}; {takes}")))
            }
        }
    }
}

impl Given<'_> {
    /// The elements, of a dtype that the engine knows.
    pub(crate) fn view(&self) -> PyResult<View<'_>> {
        match self {
            Self::Capsule(tensor) => tensor.view(),
            Self::Torch(buffer, _) => Ok(buffer.view()),
            Self::Refused(why) => Err(PyTypeError::new_err(why.clone())),
        }
    }

    /// The tensor's shape.
    pub(crate) fn shape(&self) -> Vec<usize> {
        match self {
            Self::Capsule(tensor) => tensor.shape().to_vec(),
            Self::Torch(_, shape) => shape.clone(),
            Self::Refused(_) => Vec::new(),
        }
    }

    /// The elements as memory that a collective fills.
    pub(crate) fn into_buffer(self) -> PyResult<Buffer> {
        match self {
            Self::Capsule(tensor) => tensor.buffer(),
            Self::Torch(buffer, _) => Ok(buffer),
            Self::Refused(why) => Err(PyTypeError::new_err(why)),
        }
    }
}

/// The tensor that a capsule holds, or why there is none.
fn capsule<'py>(given: Borrowed<'_, 'py, PyAny>) -> Result<Given<'py>, String> {
    if !given.is_instance_of::<PyCapsule>() {
        let kind = given.get_type().name().map(|name| name.to_string()).unwrap_or_default();
        return Err(format!("a `{kind}` is no dense tensor"));
    }
    let tensor = given.extract().map_err(|error: PyErr| error.value(given.py()).to_string())?;
    Ok(Given::Capsule(tensor))
}
