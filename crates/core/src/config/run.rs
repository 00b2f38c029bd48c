//! The text, the ranks, and where results go.

use serde::{Deserialize, Serialize};

use super::check;
use crate::ConfigError;

/// The most ranks on one machine.
const RANKS_MAX: usize = 64;

/// The text to train and validate on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DataConfig {
    /// A text file, or a folder of text files; absent for the Rust sources of this build.
    pub path: Option<String>,
    /// A `tokenizer.json` as on the Hugging Face hub, by which the text is read; absent for bytes.
    pub tokenizer: Option<String>,
    /// The part of the text that is kept for validation.
    pub validation_fraction: f64,
}

/// The ranks, and the run's folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunConfig {
    /// Where results go: a new or an empty folder; absent for the next free `runs/NNNN`.
    pub folder: Option<String>,
    /// The world size.
    pub ranks: usize,
    /// What a rank is.
    pub launch: Launch,
    /// Threads with which a rank calculates; absent to share the machine's CPUs evenly.
    pub threads_per_rank: Option<usize>,
    /// How long a rank waits for another before it gives up.
    pub deadline_seconds: f64,
}

/// What a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Launch {
    /// A process of its own; ranks share memory.
    #[default]
    Processes,
    /// A thread of one process.
    Threads,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self { path: None, tokenizer: None, validation_fraction: 0.05 }
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            folder: None,
            ranks: 2,
            launch: Launch::Processes,
            threads_per_rank: None,
            deadline_seconds: 600.0,
        }
    }
}

impl DataConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        check::path("data.path", self.path.as_deref())?;
        check::path("data.tokenizer", self.tokenizer.as_deref())?;
        let fraction = self.validation_fraction;
        let possible = fraction > 0.0 && fraction < 1.0;
        check::that(possible, "data.validation_fraction", fraction, "above 0, and below 1")
    }
}

impl RunConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        check::path("run.folder", self.folder.as_deref())?;
        check::count("run.ranks", self.ranks, 1..=RANKS_MAX)?;
        if let Some(threads) = self.threads_per_rank {
            check::count("run.threads_per_rank", threads, 1..=1024)?;
        }
        let seconds = self.deadline_seconds;
        let possible = seconds > 0.0 && seconds <= 1e9;
        check::that(possible, "run.deadline_seconds", seconds, "above 0, at most 1000000000")
    }
}
