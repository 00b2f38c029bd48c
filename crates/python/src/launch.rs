//! The package's command, `oxizero`.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command with the words after its name, and returns its exit code. Scripts run with the
/// interpreter `python`.
#[pyfunction]
pub(crate) fn command(py: Python<'_>, words: Vec<OsString>, python: OsString) -> u8 {
    py.detach(|| oxizero_launch::command(words, &python))
}
