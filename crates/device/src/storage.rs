//! Where buffers are made.

use std::sync::Arc;

use oxizero_core::{DType, Numel};

use crate::{Buffer, Device, Region};

/// Where an engine's memory lies, and so where it is computed on.
#[derive(Clone, Debug, Default)]
pub enum Storage {
    /// The host.
    #[default]
    Host,
    /// A device.
    Device(Arc<dyn Device>),
}

/// A system's page is a small part of so many bytes.
const MAPPED_FROM: usize = 1 << 20;

impl Storage {
    /// Zeroed elements.
    pub fn buffer(&self, numel: Numel, dtype: DType) -> Buffer {
        match self {
            Self::Host => Buffer::heap(numel, dtype),
            Self::Device(device) => on_device(&**device, numel, dtype),
        }
    }

    /// Zeroed elements that are to stay; see [`Buffer::mapped`]. On the host, small ones leave no
    /// pages half empty.
    pub fn resting(&self, numel: Numel, dtype: DType) -> Buffer {
        match self {
            Self::Host if numel.bytes(dtype).0 >= MAPPED_FROM => Buffer::mapped(numel, dtype),
            _ => self.buffer(numel, dtype),
        }
    }

    /// Whether a buffer is of the kind that is made here.
    pub fn holds(&self, buffer: &Buffer) -> bool {
        matches!(self, Self::Device(_)) == buffer.region().is_on_device()
    }
}

/// Zeroed elements on a device.
pub(crate) fn on_device(device: &dyn Device, numel: Numel, dtype: DType) -> Buffer {
    Buffer::new(Region::on_device(device.alloc(numel.bytes(dtype))), dtype)
}
