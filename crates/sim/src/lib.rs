//! The simulated world, and the oracle that the engine is checked against.
//!
//! Test support: nothing in the product depends on this crate.
#![forbid(unsafe_code)]
