//! The engine's errors as Python exceptions.

use oxizero::EngineError as Error;
use oxizero::comm::CommError as EngineCommError;
use oxizero_core::ConfigError as EngineConfigError;
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};

use crate::process::interrupt;
use crate::words;

pyo3::create_exception!(oxizero, EngineError, PyRuntimeError, "The engine refused or failed.");
pyo3::create_exception!(
    oxizero,
    CommError,
    EngineError,
    "A collective did not complete: a rank ended, was late, or made another call."
);
pyo3::create_exception!(
    oxizero,
    ConfigError,
    PyValueError,
    "A configuration that the engine does not run; the message names the field."
);

/// The exception of an error of the engine.
pub(crate) fn raised(error: Error) -> PyErr {
    told(&error, words::of(&error))
}

/// The same, with these words.
pub(crate) fn told(error: &Error, words: String) -> PyErr {
    match error {
        Error::Config(_) | Error::Optim(_) => ConfigError::new_err(words),
        Error::Comm(_) => interrupt().unwrap_or_else(|| CommError::new_err(words)),
        _ => EngineError::new_err(words),
    }
}

/// The exception of an engine that was left in the middle of a call.
pub(crate) fn lost(why: &str) -> PyErr {
    EngineError::new_err(format!("the engine is lost, since a call failed in the middle: {why}"))
}

/// The exception of what the engine does not know of.
pub(crate) fn engine(why: String) -> PyErr {
    EngineError::new_err(why)
}

/// The exception of a call in a fork of a rank's process.
pub(crate) fn forked() -> PyErr {
    EngineError::new_err(
        "this process was forked from a rank's, and is none itself: only the rank may call its \
         engine and oxizero.comm",
    )
}

/// The exception of a call in the middle of another one of the same thread.
pub(crate) fn in_a_call() -> PyErr {
    EngineError::new_err(
        "the engine is in a call of this thread: a signal's handler, or what else runs in the \
         middle of one, cannot call the engine; note there what is to be done, and do it after",
    )
}

/// The exception of an error of the configuration.
pub(crate) fn config(error: EngineConfigError) -> PyErr {
    ConfigError::new_err(error.to_string())
}

/// The exception of an error between ranks: of a signal's handler, if that ended the wait.
pub(crate) fn comm(error: EngineCommError) -> PyErr {
    interrupt().unwrap_or_else(|| CommError::new_err(words::of_ranks(&error)))
}
