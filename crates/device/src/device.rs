//! Memory that the host cannot address, and whoever computes there.
//!
//! The kernels of this crate take views of such memory as they take the host's, and hand them to
//! the memory's [`Device`]. All views of one call lie on one device, but for copies, which go in
//! either direction. A device orders what it is asked for as it is asked, and need not have done it
//! when it returns: only [`Device::read`] and [`Device::measure`] wait for it.

use std::any::Any;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::Range;

use oxizero_core::{Bytes, DType, Numel};

use crate::kernels::{Combine, Measure};
use crate::{View, ViewMut};

/// A run of bytes on a device, which go with it. Whoever holds views of it keeps to their borrows;
/// the memory itself is written through a shared reference, as a device's is.
pub trait DeviceMemory: Any + Debug + Send + Sync {
    /// The size.
    fn bytes(&self) -> Bytes;

    /// Where it lies.
    fn device(&self) -> &dyn Device;
}

/// Allocates and computes. Each method is the kernel of its name on elements of this device, with
/// the same rounding; what a device promises of the order of a sum, it says itself.
///
/// What fails there (memory that is used up, a device that is lost) unwinds to the caller's edge,
/// and the engine is lost with it.
pub trait Device: Debug + Send + Sync {
    /// Zeroed memory.
    fn alloc(&self, bytes: Bytes) -> Box<dyn DeviceMemory>;

    /// Copies elements to host memory of the same dtype and length.
    fn read(&self, source: DeviceView<'_>, target: ViewMut<'_>);

    /// Copies elements of host memory to those of the same dtype and length.
    fn write(&self, source: View<'_>, target: DeviceViewMut<'_>);

    /// See [`kernels::fill`](crate::kernels::fill).
    fn fill(&self, target: DeviceViewMut<'_>, value: f32);

    /// See [`kernels::cast`](crate::kernels::cast).
    fn cast(&self, source: DeviceView<'_>, target: DeviceViewMut<'_>);

    /// See [`kernels::adopt`](crate::kernels::adopt).
    fn adopt(&self, source: DeviceView<'_>, target: DeviceViewMut<'_>);

    /// See [`kernels::tree_sum`](crate::kernels::tree_sum).
    fn tree_sum(&self, inputs: &[DeviceView<'_>], target: DeviceViewMut<'_>, combine: Combine);

    /// See [`kernels::divide`](crate::kernels::divide).
    fn divide(&self, grad: DeviceViewMut<'_>, divisor: f32);

    /// The sizes that [`kernels::measure`](crate::kernels::measure) finds of `grads` with that
    /// divisor, and what tells each of `weights` from others, bit by bit and in order; all in one
    /// read.
    fn measure(
        &self,
        grads: &[DeviceView<'_>],
        by: (f32, Measure),
        weights: &[DeviceView<'_>],
    ) -> (Vec<f64>, Vec<u64>);
}

/// Elements on a device, to read.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a> {
    memory: &'a dyn DeviceMemory,
    start: usize,
    numel: Numel,
    dtype: DType,
}

/// Elements on a device, to write.
#[derive(Debug)]
pub struct DeviceViewMut<'a> {
    view: DeviceView<'a>,
    /// Nobody else views them.
    exclusive: PhantomData<&'a mut ()>,
}

impl<'a> DeviceView<'a> {
    /// All of `memory` as elements of `dtype`.
    pub fn of_memory(memory: &'a dyn DeviceMemory, dtype: DType) -> Self {
        Self { memory, start: 0, numel: memory.bytes().numel(dtype), dtype }
    }

    /// Where the elements lie.
    pub fn device(self) -> &'a dyn Device {
        self.memory.device()
    }

    /// The memory that holds the elements.
    pub fn memory(self) -> &'a dyn DeviceMemory {
        self.memory
    }

    /// Which of the memory's elements of this dtype they are.
    pub fn elements(self) -> Range<usize> {
        self.start..self.start + self.numel.0
    }

    /// The type of the elements.
    pub fn dtype(self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn numel(self) -> Numel {
        self.numel
    }

    /// The elements of `range`.
    ///
    /// # Panics
    ///
    /// If the range ends after the elements.
    pub fn range(self, range: Range<usize>) -> Self {
        let within = range.start <= range.end && range.end <= self.numel.0;
        assert!(within, "{range:?} of {} elements", self.numel);
        Self { start: self.start + range.start, numel: Numel(range.len()), ..self }
    }
}

impl<'a> DeviceViewMut<'a> {
    /// The elements of a view that is exclusive: whoever calls this holds their buffer so.
    pub(crate) fn of_exclusive(view: DeviceView<'a>) -> Self {
        Self { view, exclusive: PhantomData }
    }

    /// The elements, to read.
    pub fn as_view(&self) -> DeviceView<'_> {
        self.view
    }

    /// Where the elements lie.
    pub fn device(&self) -> &'a dyn Device {
        self.view.memory.device()
    }

    /// The same elements, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> DeviceViewMut<'_> {
        DeviceViewMut::of_exclusive(self.view)
    }

    /// The elements of `range`.
    ///
    /// # Panics
    ///
    /// If the range ends after the elements.
    pub fn range(self, range: Range<usize>) -> Self {
        Self::of_exclusive(self.view.range(range))
    }
}
