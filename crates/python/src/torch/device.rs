//! Torch's tensors as memory, and its operations as kernels.

use std::any::Any;
use std::fmt;
use std::panic::resume_unwind;
use std::sync::Arc;

use oxizero::{Buffer, Bytes, DType, Device, DeviceMemory, View, ViewMut};
use oxizero_device::kernels::{Combine, Measure, Power};
use oxizero_device::{DeviceView, DeviceViewMut, Region};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::streams::TorchStreams;
use crate::config::torch_name;

/// `oxizero.torch_backend.Device`: a torch device, and the operations on it. What fails there
/// unwinds with Python's exception, which `Engine::run` raises again.
#[derive(Clone)]
pub(crate) struct TorchDevice {
    operations: Arc<Py<PyAny>>,
    /// Of a device that does its work later; memory that is given needs none, for its owner keeps
    /// it.
    streams: Option<TorchStreams>,
}

/// A flat tensor of bytes.
struct TorchMemory {
    tensor: Py<PyAny>,
    bytes: Bytes,
    device: TorchDevice,
}

/// Elements of a tensor of bytes: the tensor, torch's name of their dtype, the first one, and the
/// one after the last.
type At<'py> = (Bound<'py, PyAny>, &'static str, usize, usize);

impl TorchDevice {
    pub(crate) fn new(operations: Py<PyAny>, streams: Option<TorchStreams>) -> Self {
        Self { operations: Arc::new(operations), streams }
    }

    /// Calls an operation.
    fn call<'py, A>(&self, py: Python<'py>, operation: &str, args: A) -> Bound<'py, PyAny>
    where
        A: pyo3::call::PyCallArgs<'py>,
    {
        ok(self.operations.bind(py).call_method1(operation, args))
    }

    fn memory(&self, tensor: Bound<'_, PyAny>) -> PyResult<TorchMemory> {
        let bytes = Bytes(tensor.call_method0("numel")?.extract()?);
        Ok(TorchMemory { tensor: tensor.unbind(), bytes, device: self.clone() })
    }
}

/// The value, or an unwinding with Python's exception: a kernel's caller has no use for it.
pub(super) fn ok<T>(result: PyResult<T>) -> T {
    result.unwrap_or_else(|error| resume_unwind(Box::new(error)))
}

/// The elements as Python's operations take them.
///
/// # Panics
///
/// If they are not torch's.
pub(super) fn at<'py>(py: Python<'py>, view: DeviceView<'_>) -> At<'py> {
    let memory: &dyn Any = view.memory();
    let memory = memory.downcast_ref::<TorchMemory>().expect("one back end has one kind of memory");
    let elements = view.elements();
    (memory.tensor.bind(py).clone(), torch_name(view.dtype()), elements.start, elements.end)
}

/// The same of a view that is torch's.
///
/// # Panics
///
/// If it is the host's.
pub(super) fn at_view<'py>(py: Python<'py>, view: View<'_>) -> At<'py> {
    match view {
        View::Device(view) => at(py, view),
        other => panic!("{} elements of the host on torch's device", other.numel()),
    }
}

/// A tensor that Python gives, flattened to bytes, as a buffer in its memory.
pub(crate) fn given(
    operations: Py<PyAny>,
    bytes: Bound<'_, PyAny>,
    dtype: DType,
) -> PyResult<Buffer> {
    let memory = TorchDevice::new(operations, None).memory(bytes)?;
    Ok(Buffer::new(Region::on_device(Box::new(memory)), dtype))
}

/// A tensor of these elements, in their memory.
pub(crate) fn tensor(py: Python<'_>, view: DeviceView<'_>, shape: &[usize]) -> PyResult<Py<PyAny>> {
    let memory: &dyn Any = view.memory();
    let memory = memory.downcast_ref::<TorchMemory>().expect("one back end has one kind of memory");
    let device = memory.device.operations.bind(py);
    Ok(device.call_method1("tensor", (at(py, view), shape.to_vec()))?.unbind())
}

impl DeviceMemory for TorchMemory {
    fn bytes(&self) -> Bytes {
        self.bytes
    }

    fn device(&self) -> &dyn Device {
        &self.device
    }
}

impl Device for TorchDevice {
    fn alloc(&self, bytes: Bytes) -> Box<dyn DeviceMemory> {
        Python::attach(|py| {
            let tensor = self.call(py, "alloc", (bytes.0,));
            Box::new(ok(self.memory(tensor))) as Box<dyn DeviceMemory>
        })
    }

    fn read(&self, source: DeviceView<'_>, target: ViewMut<'_>) {
        Python::attach(|py| {
            let bytes = self.call(py, "read", (at(py, source),));
            target.bytes_mut().copy_from_slice(ok(bytes.extract::<&[u8]>().map_err(PyErr::from)));
        });
    }

    fn write(&self, source: View<'_>, target: DeviceViewMut<'_>) {
        Python::attach(|py| {
            let bytes = PyBytes::new(py, source.bytes());
            self.call(py, "write", (bytes, at(py, target.as_view())));
        });
    }

    fn fill(&self, target: DeviceViewMut<'_>, value: f32) {
        Python::attach(|py| {
            self.call(py, "fill", (at(py, target.as_view()), value));
        });
    }

    fn cast(&self, source: DeviceView<'_>, target: DeviceViewMut<'_>) {
        Python::attach(|py| {
            self.call(py, "cast", (at(py, source), at(py, target.as_view())));
        });
    }

    fn adopt(&self, source: DeviceView<'_>, target: DeviceViewMut<'_>) {
        Python::attach(|py| {
            self.call(py, "adopt", (at(py, source), at(py, target.as_view())));
        });
    }

    fn tree_sum(&self, inputs: &[DeviceView<'_>], target: DeviceViewMut<'_>, combine: Combine) {
        Python::attach(|py| {
            let inputs: Vec<_> = inputs.iter().map(|input| at(py, *input)).collect();
            let adds = combine == Combine::Add;
            self.call(py, "tree_sum", (inputs, at(py, target.as_view()), adds));
        });
    }

    fn divide(&self, grad: DeviceViewMut<'_>, divisor: f32) {
        Python::attach(|py| {
            self.call(py, "divide", (at(py, grad.as_view()), divisor));
        });
    }

    fn measure(
        &self,
        grads: &[DeviceView<'_>],
        (divisor, measure): (f32, Measure),
        weights: &[DeviceView<'_>],
    ) -> (Vec<f64>, Vec<u64>) {
        let power = match measure {
            Measure::Sum(Power::One) => Some(1),
            Measure::Sum(Power::Two) => Some(2),
            Measure::Sum(Power::Three) => Some(3),
            Measure::Largest => None,
        };
        Python::attach(|py| {
            let grads: Vec<_> = grads.iter().map(|grad| at(py, *grad)).collect();
            let weights: Vec<_> = weights.iter().map(|weights| at(py, *weights)).collect();
            ok(self.call(py, "measure", (grads, divisor, power, weights)).extract())
        })
    }
}

impl Drop for TorchMemory {
    fn drop(&mut self) {
        if let Some(streams) = &self.device.streams {
            streams.let_go(&self.tensor);
        }
    }
}

impl fmt::Debug for TorchDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("torch")
    }
}

impl fmt::Debug for TorchMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "torch's {}", self.bytes)
    }
}
