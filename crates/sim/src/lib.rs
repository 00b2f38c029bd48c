//! The simulated world, and the oracle that the engine is checked against.
//!
//! Test support: nothing in the product depends on this crate.
#![forbid(unsafe_code)]

mod compare;
pub mod oracle;
mod rounding;
pub mod trial;
pub mod watched;
pub mod world;

pub use compare::first_difference;
pub use rounding::round;
