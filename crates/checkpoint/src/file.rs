//! Files and folders of a checkpoint: their names, and that they are on the disk.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::CheckpointError;

/// The longest name that file systems take.
const NAME_BYTES_MAX: usize = 255;

/// Refuses a name that is not that of a file in a folder: with separators, hidden, or none.
pub(crate) fn check_name(what: &'static str, name: &str) -> Result<(), CheckpointError> {
    let problem = if name.is_empty() || name.len() > NAME_BYTES_MAX {
        "it has not 1 to 255 bytes"
    } else if name.starts_with('.') {
        "it starts with a dot"
    } else if name.contains(['/', '\\']) || name.chars().any(char::is_control) {
        "it has a separator or a control character"
    } else {
        return Ok(());
    };
    let name = name.chars().take(NAME_BYTES_MAX).collect();
    Err(CheckpointError::Name { what, name, problem: problem.into() })
}

/// Opens a regular file to read. A link is not followed, and nothing else is waited for.
pub(crate) fn open(path: &Path) -> Result<File, CheckpointError> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(|error| CheckpointError::io("open", path)(error.into()))?);
    let data = file.metadata().map_err(CheckpointError::io("look at", path))?;
    match data.is_file() {
        true => Ok(file),
        false => Err(CheckpointError::file(path, "is no regular file")),
    }
}

/// The bytes of a regular file, of which there may be so many.
pub(crate) fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>, CheckpointError> {
    let mut bytes = Vec::new();
    let file = open(path)?;
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(CheckpointError::io("read", path))?;
    match bytes.len() as u64 <= bytes_max {
        true => Ok(bytes),
        false => Err(CheckpointError::file(path, format!("has more than {bytes_max} bytes"))),
    }
}

/// The folder that a file or folder is in, or is to be.
pub(crate) fn parent(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// The folder of what is to be at `path`, and the path in it under which it is written until it is
/// whole; no other process has the same.
pub(crate) fn aside(path: &Path) -> Result<(&Path, PathBuf), CheckpointError> {
    let Some(name) = path.file_name() else {
        return Err(CheckpointError::file(path, "is no name for something new"));
    };
    let (name, process) = (name.to_string_lossy(), std::process::id());
    let folder = parent(path);
    Ok((folder, folder.join(format!(".{name}.partial-{process}"))))
}

/// Returns when the file's bytes are on the disk.
pub(crate) fn sync(file: &File, path: &Path) -> Result<(), CheckpointError> {
    file.sync_all().map_err(CheckpointError::io("sync", path))
}

/// Returns when the names in a folder are on the disk.
pub(crate) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    let folder = File::open(path).map_err(CheckpointError::io("open", path))?;
    sync(&folder, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_names() {
        for name in ["rank-0.safetensors", "global_step5", "a b", "ä", "-"] {
            assert_eq!(check_name("file", name), Ok(()), "{name}");
        }
        let long = "a".repeat(256);
        for name in ["", ".", "..", "../a", "/a", "a/b", "a\\b", "a\0", "a\nb", ".a", &long] {
            assert!(check_name("file", name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("file"), b"12345").unwrap();
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), Mode::RUSR | Mode::WUSR).unwrap();
        assert_eq!(read(&at("file"), 5).unwrap(), b"12345");
        for (name, max) in [("file", 4), ("link", 5), ("pipe", 5), ("none", 5), (".", 5)] {
            let error = read(&at(name), max).unwrap_err().to_string();
            assert!(error.contains(folder.path().to_str().unwrap()), "{error}");
        }
    }
}
