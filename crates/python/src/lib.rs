//! The engine as a Python extension module, `oxizero._oxizero`.
//!
//! An edge: it turns Python's values into the engine's and back, and decides nothing. Tensors pass
//! as DLPack capsules (`tensor.rs`, the only file with unsafe code), or stay in torch's hands
//! (`torch/`). Every call that may wait for
//! another rank releases the interpreter's lock.
#![cfg(feature = "extension")]

mod access;
mod agree;
mod arrangement;
mod checkpoint;
mod config;
mod engine;
mod error;
mod gathered;
mod given;
mod imported;
mod launch;
mod model_save;
mod one_call;
mod optimizer;
mod process;
mod ranks;
mod setup;
#[expect(unsafe_code, reason = "memory that torch and the engine share, behind a safe face")]
mod tensor;
mod torch;
mod words;
mod world;

use pyo3::pymodule;

/// The native engine behind `oxizero`.
#[pymodule]
mod _oxizero {
    #[pymodule_export]
    use crate::arrangement::Arrangement;
    #[pymodule_export]
    use crate::config::Config;
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::error::{CommError, ConfigError, EngineError};
    #[pymodule_export]
    use crate::imported::write_checkpoint;
    #[pymodule_export]
    use crate::launch::command;
    #[pymodule_export]
    use crate::model_save::write_safetensors;
    #[pymodule_export]
    use crate::ranks::Ranks;
    /// The package's version.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name of it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
