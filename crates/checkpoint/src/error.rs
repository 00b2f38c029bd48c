//! What can be wrong with a checkpoint, or with the disk.

use std::io;
use std::path::Path;

/// Every error of this crate. Files are named with their paths.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The system refused: no space, no permission, no such file.
    #[error("cannot {what} `{path}`: {why}")]
    Io {
        /// What was to be done.
        what: &'static str,
        /// Which file or folder.
        path: String,
        /// The system's reason.
        why: String,
    },
    /// The checkpoint is written, and can be loaded by its name; something after that failed.
    #[error("the checkpoint `{checkpoint}` is written, but {problem}")]
    Written {
        /// Its folder.
        checkpoint: String,
        /// What was not done, and why.
        problem: String,
    },
    /// A folder without a checkpoint.
    #[error("there is no checkpoint in `{folder}`: {why}")]
    NoCheckpoint {
        /// Where one was looked for.
        folder: String,
        /// What is missing, and what there is.
        why: String,
    },
    /// A name that is more than the name of a file in the folder.
    #[error("`{name}` cannot be the name of a {what}: {problem}")]
    Name {
        /// What is named so.
        what: &'static str,
        /// The name.
        name: String,
        /// Why not.
        problem: String,
    },
    /// A file that is not what a checkpoint has there.
    #[error("`{file}` {problem}")]
    File {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A manifest that describes no checkpoint.
    #[error("the manifest is wrong about {tensor}: {problem}")]
    Manifest {
        /// The tensor, or the part of the manifest.
        tensor: String,
        /// What is wrong.
        problem: String,
    },
    /// Elements of a tensor that are not those that were written.
    #[error("{tensor} in `{file}` {problem}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// The file.
        file: String,
        /// What is wrong, and where.
        problem: String,
    },
    /// A tensor that a checkpoint has otherwise than it is asked for.
    #[error("{tensor}: {problem}")]
    Asked {
        /// The tensor.
        tensor: String,
        /// How it is in the checkpoint.
        problem: String,
    },
}

impl CheckpointError {
    /// What makes one of the system's error.
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.display().to_string();
        move |error| Self::Io { what, path, why: error.to_string() }
    }

    /// This error, after the checkpoint in the folder `target` was written.
    pub(crate) fn after(self, target: &Path) -> Self {
        Self::Written { checkpoint: target.display().to_string(), problem: self.to_string() }
    }

    pub(crate) fn file(path: &Path, problem: impl Into<String>) -> Self {
        Self::File { file: path.display().to_string(), problem: problem.into() }
    }

    pub(crate) fn manifest(tensor: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Manifest { tensor: tensor.into(), problem: problem.into() }
    }
}
