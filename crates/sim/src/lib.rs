//! The simulated world, and the oracle that the engine is checked against.
//!
//! The engine does not know this crate; the command's `parity` shows it to users.
#![forbid(unsafe_code)]

mod compare;
pub mod drawn;
pub mod layouts;
pub mod odd;
pub mod opaque;
pub mod oracle;
mod rounding;
pub mod trial;
pub mod watched;
pub mod world;

pub use compare::{Differences, first_difference};
pub use rounding::round;
