//! Tensors over the engine's memory, and the engine's views of tensors.

use std::sync::Arc;

use burn::tensor::{self, AllocationProperty, Device, Tensor, TensorData};
use oxizero::{GradView, ParamWeights};
use oxizero_core::DType;
use oxizero_device::Buffer;

/// A parameter's weights as a tensor. On a CPU it is a view of the engine's bucket, which stays
/// borrowed until every handle is gone; burn copies what it would write to. Other devices copy.
pub(crate) fn lend<const D: usize>(weights: &ParamWeights, device: &Device) -> Tensor<D> {
    let owner = bytes::Bytes::from_owner(Lent(Arc::clone(&weights.bucket)));
    let bytes = owner.slice(weights.bytes());
    let bytes = tensor::Bytes::from_shared(bytes, AllocationProperty::Other);
    let dtype = burn_dtype(weights.dtype());
    let data = TensorData::from_bytes(bytes, weights.shape.clone(), dtype);
    // With no dtype named, burn converts to the device's default one, which is a copy.
    Tensor::from_data(data, (device, dtype))
}

/// Lets `read` look at a tensor's elements in row-major order.
pub(crate) fn read<const D: usize, T>(
    tensor: Tensor<D>,
    read: impl FnOnce(GradView<'_>) -> T,
) -> T {
    let data = tensor.into_data(); // on a CPU no copy, where nobody else holds the tensor
    read(GradView::of_bytes(data.as_bytes(), engine_dtype(data.dtype())))
}

/// burn's name for a dtype.
pub(crate) fn burn_dtype(dtype: DType) -> tensor::DType {
    match dtype {
        DType::F32 => tensor::DType::F32,
        DType::Bf16 => tensor::DType::BF16,
        DType::F16 => tensor::DType::F16,
    }
}

fn engine_dtype(dtype: tensor::DType) -> DType {
    match dtype {
        tensor::DType::F32 => DType::F32,
        tensor::DType::BF16 => DType::Bf16,
        tensor::DType::F16 => DType::F16,
        other => panic!("a gradient of dtype {other:?}; layers compute in f32, bf16 or f16"),
    }
}

struct Lent(Arc<Buffer>);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.0.region().bytes()
    }
}
