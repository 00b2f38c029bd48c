//! A region with a dtype, and typed views of it.

use std::ops::Range;

use half::{bf16, f16};
use oxizero_core::{Bytes, DType, Numel};

use crate::storage::on_device;
use crate::{DeviceView, DeviceViewMut, Region, kernels};

/// A region that holds elements of one dtype.
#[derive(Debug)]
pub struct Buffer {
    region: Region,
    dtype: DType,
}

impl Buffer {
    /// Takes the region to hold elements of `dtype`.
    ///
    /// # Panics
    ///
    /// If the region's size is not a whole number of elements.
    pub fn new(region: Region, dtype: DType) -> Self {
        assert!(region.len().0.is_multiple_of(dtype.size()), "{region:?} of {dtype}");
        Self { region, dtype }
    }

    /// Zeroed elements on the heap.
    pub fn heap(numel: Numel, dtype: DType) -> Self {
        Self::new(Region::heap(numel.bytes(dtype)), dtype)
    }

    /// Zeroed elements in memory of their own; see [`Region::mapped`].
    pub fn mapped(numel: Numel, dtype: DType) -> Self {
        Self::new(Region::mapped(numel.bytes(dtype)), dtype)
    }

    /// A copy of these elements, on the heap, or on the device that they lie on.
    pub fn copy_of(view: View<'_>) -> Self {
        let (numel, dtype) = (view.numel(), view.dtype());
        let mut copy = match view {
            View::Device(view) => on_device(view.device(), numel, dtype),
            _ => Self::heap(numel, dtype),
        };
        kernels::cast(view, copy.view_mut());
        copy
    }

    /// Takes the elements out, and leaves none.
    pub fn take(&mut self) -> Self {
        let empty = Self::heap(Numel(0), self.dtype);
        std::mem::replace(self, empty)
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn numel(&self) -> Numel {
        self.region.len().numel(self.dtype)
    }

    /// The size in bytes.
    pub fn len(&self) -> Bytes {
        self.region.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// The storage.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The storage, for writing.
    pub fn region_mut(&mut self) -> &mut Region {
        &mut self.region
    }

    /// All elements.
    pub fn view(&self) -> View<'_> {
        match self.region.device_memory() {
            Some(memory) => View::Device(DeviceView::of_memory(memory, self.dtype)),
            None => View::of_bytes(self.region.bytes(), self.dtype),
        }
    }

    /// The elements of `range`.
    pub fn range(&self, range: Range<usize>) -> View<'_> {
        self.view().range(range)
    }

    /// All elements, for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        self.range_mut(0..self.numel().0)
    }

    /// The elements of `range`, for writing.
    pub fn range_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        if self.region.is_on_device() {
            let memory = self.region.device_memory().expect("it lies on a device");
            let view = DeviceView::of_memory(memory, self.dtype).range(range);
            return ViewMut::Device(DeviceViewMut::of_exclusive(view));
        }
        let size = self.dtype.size();
        let bytes = self.region.range_mut(range.start * size..range.end * size);
        ViewMut::of_bytes(bytes, self.dtype)
    }

    /// The elements as f32.
    ///
    /// # Panics
    ///
    /// If the dtype is another, or they lie on a device.
    pub fn f32(&self) -> &[f32] {
        match self.view() {
            View::F32(values) => values,
            _ => panic!("a buffer of {} read as f32", self.dtype),
        }
    }

    /// The elements of `range` as f32, for writing.
    ///
    /// # Panics
    ///
    /// If the dtype is another, or they lie on a device.
    pub fn f32_mut(&mut self, range: Range<usize>) -> &mut [f32] {
        let dtype = self.dtype;
        match self.range_mut(range) {
            ViewMut::F32(values) => values,
            _ => panic!("a buffer of {dtype} written as f32"),
        }
    }
}

/// Elements to read.
#[derive(Clone, Copy, Debug)]
pub enum View<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// bf16 elements.
    Bf16(&'a [bf16]),
    /// f16 elements.
    F16(&'a [f16]),
    /// Elements that the host cannot address, of any dtype.
    Device(DeviceView<'a>),
}

/// Elements to write.
#[derive(Debug)]
pub enum ViewMut<'a> {
    /// f32 elements.
    F32(&'a mut [f32]),
    /// bf16 elements.
    Bf16(&'a mut [bf16]),
    /// f16 elements.
    F16(&'a mut [f16]),
    /// Elements that the host cannot address, of any dtype.
    Device(DeviceViewMut<'a>),
}

impl<'a> View<'a> {
    /// Reads `bytes` as elements of `dtype`.
    ///
    /// # Panics
    ///
    /// If the bytes are not aligned for the dtype, or are not a whole number of elements.
    pub fn of_bytes(bytes: &'a [u8], dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32(bytemuck::cast_slice(bytes)),
            DType::Bf16 => Self::Bf16(bytemuck::cast_slice(bytes)),
            DType::F16 => Self::F16(bytemuck::cast_slice(bytes)),
        }
    }

    /// The type of the elements.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::Bf16(_) => DType::Bf16,
            Self::F16(_) => DType::F16,
            Self::Device(view) => view.dtype(),
        }
    }

    /// The number of elements.
    pub fn numel(self) -> Numel {
        Numel(match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Device(view) => return view.numel(),
        })
    }

    /// The elements of `range`.
    pub fn range(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&values[range]),
            Self::Bf16(values) => Self::Bf16(&values[range]),
            Self::F16(values) => Self::F16(&values[range]),
            Self::Device(view) => Self::Device(view.range(range)),
        }
    }

    /// The elements' bytes.
    ///
    /// # Panics
    ///
    /// If they lie on a device.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::Bf16(values) => bytemuck::cast_slice(values),
            Self::F16(values) => bytemuck::cast_slice(values),
            Self::Device(view) => panic!("the host reads {view:?}"),
        }
    }
}

impl<'a> ViewMut<'a> {
    /// Writes `bytes` as elements of `dtype`.
    ///
    /// # Panics
    ///
    /// If the bytes are not aligned for the dtype, or are not a whole number of elements.
    pub fn of_bytes(bytes: &'a mut [u8], dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32(bytemuck::cast_slice_mut(bytes)),
            DType::Bf16 => Self::Bf16(bytemuck::cast_slice_mut(bytes)),
            DType::F16 => Self::F16(bytemuck::cast_slice_mut(bytes)),
        }
    }

    /// The same elements, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        match self {
            Self::F32(values) => ViewMut::F32(values),
            Self::Bf16(values) => ViewMut::Bf16(values),
            Self::F16(values) => ViewMut::F16(values),
            Self::Device(view) => ViewMut::Device(view.reborrow()),
        }
    }

    /// The elements, to read.
    pub fn as_view(&self) -> View<'_> {
        match self {
            Self::F32(values) => View::F32(values),
            Self::Bf16(values) => View::Bf16(values),
            Self::F16(values) => View::F16(values),
            Self::Device(view) => View::Device(view.as_view()),
        }
    }

    /// The elements of `range`.
    pub fn range(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(values) => Self::F32(&mut values[range]),
            Self::Bf16(values) => Self::Bf16(&mut values[range]),
            Self::F16(values) => Self::F16(&mut values[range]),
            Self::Device(view) => Self::Device(view.range(range)),
        }
    }

    /// The elements' bytes.
    ///
    /// # Panics
    ///
    /// If they lie on a device.
    pub fn bytes_mut(self) -> &'a mut [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice_mut(values),
            Self::Bf16(values) => bytemuck::cast_slice_mut(values),
            Self::F16(values) => bytemuck::cast_slice_mut(values),
            Self::Device(view) => panic!("the host writes {view:?}"),
        }
    }
}
