//! The tensor edge: torch's memory as the engine's views, and the engine's memory as torch's
//! tensors, both as DLPack capsules (<https://dmlc.github.io/dlpack/latest/c_api.html>).
//!
//! What the types here cannot check, the Python face keeps: nobody writes to a tensor while a call
//! that was given it runs, and nobody uses a tensor in the engine's memory while the engine does.
//! Nobody uses or resizes one that a gather was started into, until it was waited for.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use oxizero::{Buffer, Bytes, DType, ModelGrads, Numel, ParamId, RestingWeights, View, ViewMut};
use oxizero_device::{DeviceView, REGION_ALIGN, Region};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::torch;

/// The name of a capsule that nobody has consumed.
const NAME: &CStr = c"dltensor";
const CPU: i32 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;

#[repr(C)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    dtype: DlDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

/// A contiguous CPU tensor that a capsule holds, for the length of a call.
pub(crate) struct Tensor<'py> {
    start: NonNull<u8>,
    len: usize,
    dtype: DlDataType,
    shape: Vec<usize>,
    /// Keeps the memory.
    capsule: PhantomData<Bound<'py, PyAny>>,
    _owner: Bound<'py, PyAny>,
}

impl<'py> FromPyObject<'_, 'py> for Tensor<'py> {
    type Error = PyErr;

    fn extract(capsule: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // SAFETY: the pointer is a Python object's; the call checks that it is a capsule of that
        // name, and sets an exception where it is not.
        let managed = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
        let Some(managed) = NonNull::new(managed.cast::<DlManagedTensor>()) else {
            return Err(PyErr::fetch(capsule.py()));
        };
        // SAFETY: a capsule of this name holds such a struct, and keeps it until it is dropped.
        let tensor = unsafe { &managed.as_ref().tensor };
        if tensor.device.kind != CPU {
            let kind = tensor.device.kind;
            let why = format!("a tensor on a device of DLPack kind {kind}; move it to the CPU");
            return Err(PyTypeError::new_err(why));
        }
        let size = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes) / 8;
        let shape = contiguous_shape(tensor)?;
        let len = shape.iter().product::<usize>() * size;
        let start = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        let start = match NonNull::new(start) {
            Some(start) if len > 0 => start,
            _ => NonNull::<u64>::dangling().cast(),
        };
        if size == 0 || !start.addr().get().is_multiple_of(size) {
            return Err(PyValueError::new_err("a tensor's elements are not aligned; clone it"));
        }
        let _owner = capsule.to_owned();
        Ok(Self { start, len, dtype: tensor.dtype, shape, capsule: PhantomData, _owner })
    }
}

/// The shape of a tensor without gaps, in row-major order.
fn contiguous_shape(tensor: &DlTensor) -> PyResult<Vec<usize>> {
    let ndim = usize::try_from(tensor.ndim).unwrap_or_default();
    let list = |start: *const i64| match start.is_null() || ndim == 0 {
        true => None,
        // SAFETY: a DLPack tensor has `ndim` sizes and, unless the pointer is null, strides.
        false => Some(unsafe { std::slice::from_raw_parts(start, ndim) }),
    };
    let shape = list(tensor.shape).unwrap_or_default();
    let numel: i64 = shape.iter().product();
    if let (Some(strides), true) = (list(tensor.strides), numel > 0) {
        let mut expected = 1;
        for (size, stride) in shape.iter().zip(strides).rev() {
            if *size != 1 && *stride != expected {
                return Err(PyValueError::new_err("a tensor with gaps; call contiguous()"));
            }
            expected *= size;
        }
    }
    let size = |size: &i64| usize::try_from(*size);
    let shape: Result<Vec<_>, _> = shape.iter().map(size).collect();
    shape.map_err(|_| PyValueError::new_err("a tensor of negative size"))
}

impl Tensor<'_> {
    /// The elements, of a dtype that the engine knows.
    pub(crate) fn view(&self) -> PyResult<View<'_>> {
        Ok(View::of_bytes(self.bytes(), self.dtype()?))
    }

    fn dtype(&self) -> PyResult<DType> {
        Ok(match self.dtype {
            DlDataType { code: FLOAT, bits: 32, lanes: 1 } => DType::F32,
            DlDataType { code: FLOAT, bits: 16, lanes: 1 } => DType::F16,
            DlDataType { code: BFLOAT, bits: 16, lanes: 1 } => DType::Bf16,
            DlDataType { code, bits, .. } => {
                let why = format!(
                    "a tensor of DLPack type {code} with {bits} bits; the engine takes float32, \
                     bfloat16 and float16"
                );
                return Err(PyTypeError::new_err(why));
            }
        })
    }

    /// The elements as memory that a collective fills.
    pub(crate) fn buffer(&self) -> PyResult<Buffer> {
        let dtype = self.dtype()?;
        if self.len == 0 {
            return Ok(Buffer::heap(Numel(0), dtype));
        }
        if !self.start.addr().get().is_multiple_of(REGION_ALIGN) {
            let why = format!("a tensor that does not start on a multiple of {REGION_ALIGN} bytes");
            return Err(PyValueError::new_err(why));
        }
        let owner = Box::new(self._owner.clone().unbind());
        // SAFETY: the capsule, which the region holds, keeps the tensor; nobody uses or resizes it
        // while the call runs, or the gather that it starts (see the module's doc), and whoever
        // makes a buffer drops it with these.
        let region = unsafe { Region::from_foreign(self.start, Bytes(self.len), owner) };
        Ok(Buffer::new(region, dtype))
    }

    /// The tensor's shape.
    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements' bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the capsule, which `self` holds, keeps the tensor's memory; nobody writes to it
        // meanwhile (see the module's doc).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The elements' bytes, for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`; nobody uses the tensor meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// What a capsule of ours holds.
struct Exported {
    managed: DlManagedTensor,
    shape: Vec<i64>,
    strides: Vec<i64>,
    /// Keeps the memory.
    _owner: Box<dyn Any + Send>,
}

/// Memory that becomes a tensor.
struct Memory<'a> {
    start: NonNull<u8>,
    dtype: DType,
    shape: &'a [usize],
    owner: Box<dyn Any + Send>,
}

impl Memory<'_> {
    /// The capsule.
    ///
    /// # Safety
    ///
    /// For as long as `owner` lives, as many elements as the shape has lie at `start`, and may be
    /// read and written.
    unsafe fn into_capsule(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let code = if self.dtype == DType::Bf16 { BFLOAT } else { FLOAT };
        let bits = (self.dtype.size() * 8) as u8;
        let shape: Vec<i64> = self.shape.iter().map(|size| *size as i64).collect();
        let stride = |dim: usize| self.shape[dim + 1..].iter().product::<usize>() as i64;
        let strides = (0..shape.len()).map(stride).collect();
        let tensor = DlTensor {
            data: self.start.as_ptr().cast(),
            device: DlDevice { kind: CPU, id: 0 },
            ndim: shape.len() as i32,
            dtype: DlDataType { code, bits, lanes: 1 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let context = std::ptr::null_mut();
        let managed = DlManagedTensor { tensor, context, deleter: Some(delete) };
        let exported = Exported { managed, shape, strides, _owner: self.owner };
        let exported = Box::into_raw(Box::new(exported));
        // SAFETY: `exported` is a box's, which nobody else knows yet; its lists do not move any
        // more. The capsule's name is static, and its destructor frees what nobody consumed.
        unsafe {
            (*exported).managed.tensor.shape = (*exported).shape.as_mut_ptr();
            (*exported).managed.tensor.strides = (*exported).strides.as_mut_ptr();
            (*exported).managed.context = exported.cast();
            let managed = (&raw mut (*exported).managed).cast();
            let capsule = pyo3::ffi::PyCapsule_New(managed, NAME.as_ptr(), Some(drop_capsule));
            let capsule = Bound::from_owned_ptr_or_err(py, capsule);
            if capsule.is_err() {
                drop(Box::from_raw(exported));
            }
            Ok(capsule?.unbind())
        }
    }
}

/// What the consumer of a capsule calls when it has dropped the last tensor, on any thread.
unsafe extern "C" fn delete(managed: *mut DlManagedTensor) {
    // SAFETY: `managed` is one of ours, whose context is the box that holds it; it is deleted once.
    drop(unsafe { Box::from_raw((*managed).context.cast::<Exported>()) });
}

/// Frees what a capsule holds that nobody consumed: a consumer renames it.
unsafe extern "C" fn drop_capsule(capsule: *mut pyo3::ffi::PyObject) {
    // SAFETY: Python calls this with the capsule that it is about to free; the pointer of an
    // unconsumed one is ours.
    unsafe {
        if pyo3::ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(pyo3::ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}

/// A tensor that owns `buffer`.
///
/// # Panics
///
/// If the buffer has not as many elements as the shape.
pub(crate) fn owned(py: Python<'_>, buffer: Buffer, shape: &[usize]) -> PyResult<Py<PyAny>> {
    assert_eq!(buffer.numel().0, shape.iter().product::<usize>(), "a buffer of {shape:?}");
    if let View::Device(view) = buffer.view() {
        return torch::tensor(py, view, shape);
    }
    let (start, dtype) = (buffer.region().start(), buffer.dtype());
    // SAFETY: the buffer goes along and is not used otherwise; its region owns the elements.
    unsafe { Memory { start, dtype, shape, owner: Box::new(buffer) }.into_capsule(py) }
}

/// A tensor in the memory of model weights.
pub(crate) fn weights(py: Python<'_>, lent: RestingWeights) -> PyResult<Py<PyAny>> {
    let RestingWeights { memory, bytes, dtype, shape } = lent;
    if let Some(memory) = memory.device_memory() {
        let elements = bytes.start / dtype.size()..bytes.end / dtype.size();
        return torch::tensor(py, DeviceView::of_memory(memory, dtype).range(elements), &shape);
    }
    let len = shape.iter().product::<usize>() * dtype.size();
    assert!(bytes.len() == len && bytes.end <= memory.len().0, "{bytes:?} of {memory:?}");
    // SAFETY: in bounds by the assertion. The loan keeps the memory; that nobody uses it while the
    // engine does is the Python face's to keep: it calls the engine between passes.
    unsafe {
        let start = memory.start().add(bytes.start);
        Memory { start, dtype, shape: &shape, owner: Box::new(memory) }.into_capsule(py)
    }
}

/// By parameter: its gradient as a tensor; `None` for a frozen one.
pub(crate) type GradTensors = Vec<Option<Py<PyAny>>>;

/// A tensor for each parameter that has a gradient, and `grads`, which they own together: once it
/// is the last to own them, nobody uses their memory any more. Torch's own tensors keep theirs by
/// themselves.
pub(crate) fn model_grads(
    py: Python<'_>,
    mut grads: ModelGrads,
    count: usize,
) -> PyResult<(GradTensors, Option<Arc<ModelGrads>>)> {
    let is_torchs = |(_, view): (ParamId, View<'_>)| matches!(view, View::Device(_));
    if grads.iter().any(is_torchs) {
        let tensors = (0..count).map(|param| torchs_grad(py, &grads, ParamId(param)));
        return Ok((tensors.collect::<PyResult<_>>()?, None));
    }
    let mut places = Vec::with_capacity(count);
    for param in (0..count).map(ParamId) {
        let shape = grads.shape(param).unwrap_or_default().to_vec();
        places.push(grads.get_mut(param).map(|values| (start_of(values), shape)));
    }
    let owner = Arc::new(grads);
    let capsule = |((start, dtype), shape): ((NonNull<u8>, DType), Vec<usize>)| {
        let owner = Box::new(Arc::clone(&owner));
        // SAFETY: a gradient's place has as many elements as its shape; `owner` keeps the flat
        // copies, whose memory does not move with it, and nobody uses them but through tensors,
        // whose places do not overlap.
        unsafe { Memory { start, dtype, shape: &shape, owner }.into_capsule(py) }
    };
    let tensors: PyResult<_> =
        places.into_iter().map(|place| place.map(capsule).transpose()).collect();
    Ok((tensors?, Some(owner)))
}

fn torchs_grad(py: Python<'_>, grads: &ModelGrads, param: ParamId) -> PyResult<Option<Py<PyAny>>> {
    match (grads.get(param), grads.shape(param)) {
        (Some(View::Device(view)), Some(shape)) => torch::tensor(py, view, shape).map(Some),
        _ => Ok(None),
    }
}

fn start_of(values: ViewMut<'_>) -> (NonNull<u8>, DType) {
    let dtype = values.as_view().dtype();
    (NonNull::from(values.bytes_mut()).cast(), dtype)
}
