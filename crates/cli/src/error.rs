//! What the command can refuse or fail at, and the exit code of each.

use std::path::PathBuf;
use std::process::ExitCode;

use oxizero_core::{ConfigError, Rank};

/// Every error of the command; its text is one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The configuration, or a flag that overrides it.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A configuration file that has a fault.
    #[error("{}: {why}", path.display())]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: ConfigError,
    },
    /// A file or folder that the user named.
    #[error("cannot {what} `{}`: {why}", path.display())]
    Path {
        /// What was tried.
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer, or ours.
        why: String,
    },
    /// Text that cannot be trained on.
    #[error("{0}")]
    Data(String),
    /// A rank that failed, and so ended the run.
    #[error("rank {rank} {why}")]
    Rank {
        /// The first rank that failed of itself.
        rank: Rank,
        /// How it ended.
        why: String,
    },
    /// The ranks could not be started.
    #[error("cannot start the ranks: {0}")]
    Start(String),
    /// The run's output could not be written.
    #[error("cannot write {what}: {why}")]
    Output {
        /// What was to be written.
        what: String,
        /// The system's answer.
        why: std::io::Error,
    },
}

impl CliError {
    /// 2 for what the user gave, 1 for what the run met.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Config(_) | Self::ConfigFile { .. } | Self::Path { .. } | Self::Data(_) => {
                ExitCode::from(2)
            }
            Self::Rank { .. } | Self::Start(_) | Self::Output { .. } => ExitCode::from(1),
        }
    }

    /// For `map_err` on a path's I/O.
    pub(crate) fn path(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |why| Self::Path { what, path, why: plain(&why) }
    }
}

/// The system's message without its number.
fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}
