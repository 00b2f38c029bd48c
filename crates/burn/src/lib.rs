//! The burn front-end of oxizero: burn modules as segments of the engine, and two transformers.
//!
//! burn is pinned to the patch, and no other crate of the workspace touches it.
#![forbid(unsafe_code)]

mod adapter;
mod dropout;
mod fused;
pub mod gpt2;
pub mod llama;
pub mod transformer;

pub use adapter::{
    Block, BurnError, Context, Layer, Model, ModelBuilder, Source, Tape, decay_matrices,
    initial_values,
};
pub use burn::tensor::Device;
pub use dropout::dropout;

use burn::tensor::Tensor;

/// The CPU back end's device.
pub fn cpu() -> Device {
    Device::flex()
}

/// The value of a tensor of one f32 element, such as a loss.
///
/// # Panics
///
/// If it has none, or its dtype is another.
pub fn scalar(tensor: Tensor<3>) -> f32 {
    let values: Vec<f32> = tensor.into_data().try_into_vec().expect("the tensor is f32");
    values[0]
}
