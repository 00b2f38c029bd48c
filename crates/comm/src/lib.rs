//! Collectives over a process group: the trait, and the back ends for ranks on one machine.
//!
//! This crate knows no buckets, parameters or stages of training.

mod communicator;
mod error;
mod handle;

pub use communicator::{Communicator, ReduceScatter, ReduceTarget, Traffic};
pub use error::CommError;
pub use handle::Handle;
