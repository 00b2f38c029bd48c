//! Checkpoints: tensors by name and global element range, in safetensors files beside a manifest.
//!
//! A checkpoint is a folder. Its files hold pieces of tensors, each a run of elements of the whole
//! tensor (or of one of the equal parts that it is cut into), so that whoever reads one asks for
//! the elements that it needs, and need not know who wrote it. The [`Manifest`] lists the pieces
//! with checksums of their blocks.
//!
//! A checkpoint is written aside, synced, and renamed to its name when it is whole
//! ([`Staging`]); it is read with every byte checked ([`Checkpoint`]): a file that is not what was
//! written gives an error that names it and the tensor.
//!
//! Nothing here knows the writer's or the reader's world: no ranks, stages, buckets or meshes.
#![forbid(unsafe_code)]

mod check;
mod checkpoint;
mod checksum;
mod error;
mod export;
mod file;
mod header;
mod manifest;
mod run_folder;
mod sealed;
mod staging;
mod tensor_file;
mod weight_files;
mod whole;

pub use check::BLOCK_BYTES;
pub use checkpoint::Checkpoint;
pub use checksum::Checksum;
pub use error::CheckpointError;
pub use export::ExportOptions;
pub use manifest::{Group, Manifest, Param, Piece, Role, Tensor, Training, stored_dtype};
pub use run_folder::{RunFolder, step_name};
pub use safetensors::Dtype;
pub use serde_json::Value;
pub use staging::{Fill, Planned, Staging};
pub use tensor_file::{TensorBytes, write_tensors};
pub use weight_files::WeightFiles;
pub use whole::{Give, write_whole};
