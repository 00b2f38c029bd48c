//! The engine: buckets, steps, gradient access, and the driver of segments.
#![forbid(unsafe_code)]

mod error;
pub mod segment;
mod weights;

pub use error::EngineError;
pub use oxizero_device::View as GradView;
pub use weights::{ParamWeights, UnitWeights};
