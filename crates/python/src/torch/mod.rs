//! The back end of torch: its tensors are the engine's memory, its operations the kernels, and
//! `torch.distributed` reaches the other ranks. What is done on tensors is Python's, in
//! `oxizero.torch_backend`; here it becomes the engine's traits.

mod device;
mod library;
mod rule;
mod streams;

pub(crate) use device::{TorchDevice, given, tensor};
pub(crate) use library::TorchGroup;
pub(crate) use rule::TorchRule;
pub(crate) use streams::TorchStreams;
