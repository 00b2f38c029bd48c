//! The burn front-end of oxizero: burn modules as segments of the engine, and a Llama model.
//!
//! burn is pinned to the patch, and no other crate of the workspace touches it but the command.
#![forbid(unsafe_code)]

mod adapter;
mod fused;
pub mod llama;

pub use adapter::{
    Block, BurnError, Context, Layer, Model, ModelBuilder, Source, Tape, decay_matrices,
    initial_values,
};
