//! What the command can refuse or fail at, and the exit code of each.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use oxizero_checkpoint::CheckpointError;
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
    /// A checkpoint that the user named.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A rank that failed, and so ended the run.
    #[error("rank {rank} {why}")]
    Rank {
        /// The first rank that failed of itself.
        rank: Rank,
        /// How it ended.
        why: String,
    },
    /// What the ranks met together.
    #[error("{0}")]
    Run(String),
    /// The ranks could not be started.
    #[error("cannot start the ranks: {0}")]
    Start(String),
    /// The run's output could not be written.
    #[error("cannot write {what}: {why}")]
    Output {
        /// What was to be written.
        what: String,
        /// The system's answer.
        why: io::Error,
    },
    /// The user ended the command.
    #[error("interrupted; {left}")]
    Interrupted {
        /// What is left of the run.
        left: String,
    },
    /// Who read the output does not any more.
    #[error("nobody reads the output")]
    Closed,
}

/// The exit code of a command that the user ended.
pub(crate) const INTERRUPTED: u8 = 128 + 2;

impl CliError {
    /// Says it on standard error; nothing where nobody reads, for that was the reader's wish.
    ///
    /// The exit code is 2 for what the user gave and 1 for what the run met; where it was the
    /// user's wish, it is that of a shell for a command that the system ends for the same reason
    /// (SIGINT, SIGPIPE).
    pub(crate) fn report(&self) -> ExitCode {
        let line = one_line(&self.to_string());
        match self {
            Self::Closed => {}
            Self::Interrupted { .. } => say_after_keys(&line),
            _ => say(&format!("error: {line}")),
        }
        match self {
            Self::Checkpoint(CheckpointError::Io { .. }) => ExitCode::from(1),
            Self::Config(_)
            | Self::ConfigFile { .. }
            | Self::Path { .. }
            | Self::Data(_)
            | Self::Checkpoint(_) => ExitCode::from(2),
            Self::Rank { .. } | Self::Run(_) | Self::Start(_) | Self::Output { .. } => {
                ExitCode::from(1)
            }
            Self::Interrupted { .. } => ExitCode::from(INTERRUPTED),
            Self::Closed => ExitCode::from(128 + 13),
        }
    }

    /// Of ranks that were ended by the user, and whose work may have left something.
    pub(crate) fn interrupted() -> Self {
        Self::Interrupted { left: "the ranks were ended".into() }
    }

    /// For `map_err` on writing `what`.
    pub(crate) fn output(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |why| match why.kind() {
            io::ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Output { what, why },
        }
    }

    /// For `map_err` on a path's I/O. That the disk is full is no fault of the path.
    pub(crate) fn path(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |why| match why.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::Output { what: format!("`{}`", path.display()), why }
            }
            _ => Self::Path { what, path, why: plain(&why) },
        }
    }
}

/// Says something after an interrupt: on a terminal, a live line stands there, and what the keys
/// are shown as.
pub(crate) fn say_after_keys(line: &str) {
    match io::stderr().is_terminal() {
        true => say(&format!("\n{line}")),
        false => say(line),
    }
}

/// Writes to standard error; where nobody listens any more, nothing is lost.
pub(crate) fn say(line: &str) {
    let _unheard = writeln!(io::stderr(), "{line}");
}

/// The text with its control characters escaped, such as line ends in a path.
fn one_line(text: &str) -> String {
    let shown = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(shown).collect()
}

/// The system's message without its number, as a part of a sentence.
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut rest = text.chars();
    rest.next().map(|first| first.to_lowercase().to_string() + rest.as_str()).unwrap_or_default()
}
