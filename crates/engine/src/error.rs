//! What the engine can refuse, or fail at.

use oxizero_comm::CommError;
use oxizero_core::ConfigError;

/// Every error of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The configuration is not possible.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}
