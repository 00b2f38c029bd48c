//! The folder that a run's checkpoints are in, one a step, and which of them is the latest.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::checkpoint::Checkpoint;
use crate::staging::{MANIFEST, Staging, check_replaceable};
use crate::{CheckpointError, file};

/// The name of the file that names the latest checkpoint.
pub(crate) const LATEST: &str = "latest";
/// Between a name and a number, of what is not whole yet, or not any more.
pub(crate) const PARTIAL: &str = ".partial-";
/// What follows it where a checkpoint is being removed, in place of a save's number.
const REMOVED: &str = "removed";
const STEP: &str = "step-";

/// A folder of checkpoints.
#[derive(Clone, Debug)]
pub struct RunFolder {
    path: PathBuf,
}

/// The name of the checkpoint of a step: `step-000123`.
pub fn step_name(step: u64) -> String {
    format!("{STEP}{step:06}")
}

impl RunFolder {
    /// The folder at `path`, which need not be there yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Begins the checkpoint `name`: removes what killed saves have left, and makes a folder to
    /// write to. One process begins; the others [join](Self::join) with the same numbers.
    ///
    /// `nonce` tells this save from others.
    pub fn begin(&self, name: &str, nonce: u64) -> Result<Staging, CheckpointError> {
        let staging = self.join(name, nonce)?;
        fs::create_dir_all(&self.path).map_err(CheckpointError::io("create", &self.path))?;
        for left in self.names()?.iter().filter(|name| is_left(name)) {
            remove(&self.path.join(left))?;
        }
        check_replaceable(&self.path.join(name))?;
        let folder = staging.folder();
        fs::create_dir(&folder).map_err(CheckpointError::io("create", &folder))?;
        // The run's own name is on the disk too, as far as this process may see to that.
        let _ = file::sync_folder(file::parent(&self.path));
        file::sync_folder(&self.path)?;
        Ok(staging)
    }

    /// Takes part in a checkpoint that another process began.
    pub fn join(&self, name: &str, nonce: u64) -> Result<Staging, CheckpointError> {
        check_tag(name)?;
        Ok(Staging::new(self.path.clone(), name.into(), nonce))
    }

    /// The name of the latest checkpoint.
    pub fn latest(&self) -> Result<String, CheckpointError> {
        let path = self.path.join(LATEST);
        if !path.is_file() {
            let there = self.checkpoints().unwrap_or_default().join(", ");
            let why = match there.is_empty() {
                true => "nothing was saved there; start the run anew".into(),
                false => format!("it has no file `{LATEST}`; by name there is: {there}"),
            };
            let folder = self.path.display().to_string();
            return Err(CheckpointError::NoCheckpoint { folder, why });
        }
        let text = file::read(&path, 4096)?;
        let name = String::from_utf8_lossy(&text).trim_end_matches('\n').to_owned();
        check_tag(&name)?;
        Ok(name)
    }

    /// Opens the checkpoint `name`, or the latest.
    pub fn open(&self, name: Option<&str>) -> Result<Checkpoint, CheckpointError> {
        let name = name.map_or_else(|| self.latest(), |name| Ok(name.to_owned()))?;
        check_tag(&name)?;
        Checkpoint::open(&self.path.join(name))
    }

    /// The names of the checkpoints, the oldest first.
    pub fn checkpoints(&self) -> Result<Vec<String>, CheckpointError> {
        let mut found: Vec<_> =
            self.names()?.into_iter().filter_map(|name| self.aged(name)).collect();
        found.sort();
        Ok(found.into_iter().map(|(_, name)| name).collect())
    }

    /// Removes all but the `count` youngest checkpoints of steps, whose names are as [`step_name`]
    /// gives them; the latest stays, and so do others' names.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Written`], for the latest is there whatever could not be removed.
    pub fn keep_last(&self, count: usize) -> Result<(), CheckpointError> {
        let latest = self.latest()?;
        self.remove_before(&latest, count).map_err(|error| error.after(&self.path.join(&latest)))
    }

    fn remove_before(&self, latest: &str, count: usize) -> Result<(), CheckpointError> {
        let is_step = |name: &String| {
            let digits = name.strip_prefix(STEP).unwrap_or_default();
            !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit())
        };
        let steps: Vec<_> = self.checkpoints()?.into_iter().filter(is_step).collect();
        let old = &steps[..steps.len().saturating_sub(count)];
        for name in old.iter().filter(|name| *name != latest) {
            // What is half removed must not look whole.
            let aside = self.path.join(format!("{name}{PARTIAL}{REMOVED}"));
            let path = self.path.join(name);
            fs::rename(&path, &aside).map_err(CheckpointError::io("rename", &path))?;
            file::sync_folder(&self.path)?;
            remove(&aside)?;
        }
        Ok(())
    }

    /// A checkpoint with its age.
    fn aged(&self, name: String) -> Option<(SystemTime, String)> {
        if name.contains(PARTIAL) {
            return None;
        }
        let manifest = fs::metadata(self.path.join(&name).join(MANIFEST)).ok()?;
        Some((manifest.modified().ok()?, name))
    }

    /// What is in the folder; names that are no text are nobody's here.
    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let entries = fs::read_dir(&self.path).map_err(CheckpointError::io("list", &self.path))?;
        let name = |entry: fs::DirEntry| entry.file_name().into_string().ok();
        Ok(entries.flatten().filter_map(name).collect())
    }
}

/// Refuses a name that no checkpoint can have.
fn check_tag(name: &str) -> Result<(), CheckpointError> {
    file::check_name("checkpoint", name)?;
    if name == LATEST || name.contains(PARTIAL) {
        let problem = format!("`{LATEST}` and names with `{PARTIAL}` have another meaning");
        return Err(CheckpointError::Name { what: "checkpoint", name: name.into(), problem });
    }
    Ok(())
}

/// Whether a save or a removal that was killed has left something of this name. What others keep
/// in the folder is theirs.
fn is_left(name: &str) -> bool {
    let Some((tag, ending)) = name.rsplit_once(PARTIAL) else { return false };
    let is_nonce = !ending.is_empty() && ending.bytes().all(|byte| byte.is_ascii_hexdigit());
    (tag == LATEST || check_tag(tag).is_ok()) && (is_nonce || ending == REMOVED)
}

fn remove(path: &Path) -> Result<(), CheckpointError> {
    let is_folder = path.symlink_metadata().is_ok_and(|data| data.is_dir());
    let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(CheckpointError::io("remove", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_saves_leave_is_taken_for_it() {
        for name in ["latest.partial-7f", "step-000012.partial-0", "best.partial-removed"] {
            assert!(is_left(name), "{name}");
        }
        let others =
            ["step-000012", ".hf.partial-123", "data.partial-old", "x.partial-", ".partial-1"];
        for name in others {
            assert!(!is_left(name), "{name}");
        }
    }
}
