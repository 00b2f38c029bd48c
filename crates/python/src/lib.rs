//! The engine as a Python extension module.
#![cfg(feature = "extension")]
