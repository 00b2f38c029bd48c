//! Text files of a folder, in an order that does not depend on the file system.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::CliError;

/// The text files found under a path.
#[derive(Debug, Default)]
pub(super) struct TextFiles {
    /// Their contents, sorted by path.
    pub(super) texts: Vec<Vec<u8>>,
    /// Files that are no text: they hold a NUL byte, or are not UTF-8.
    pub(super) skipped: usize,
}

impl TextFiles {
    /// Reads one file, or every file of a folder and its subfolders but hidden ones.
    pub(super) fn read(path: &Path) -> Result<Self, CliError> {
        let mut found = Self::default();
        for file in list(path, &|_| true)? {
            found.push(fs::read(&file).map_err(CliError::path("read", &file))?);
        }
        Ok(found)
    }

    fn push(&mut self, text: Vec<u8>) {
        let is_text = !text.contains(&0) && std::str::from_utf8(&text).is_ok();
        match is_text {
            true if text.is_empty() => {}
            true => self.texts.push(text),
            false => self.skipped += 1,
        }
    }
}

/// The files under `path` that are `wanted`, sorted; links to folders are not followed.
pub(super) fn list(path: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<Vec<PathBuf>, CliError> {
    let metadata = fs::metadata(path).map_err(CliError::path("read", path))?;
    if !metadata.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let (mut open, mut files) = (vec![path.to_path_buf()], Vec::new());
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).map_err(CliError::path("read", &folder))? {
            let entry = entry.map_err(CliError::path("read", &folder))?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let kind = entry.file_type().map_err(CliError::path("read", entry.path()))?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if entry.path().is_file() && wanted(&entry.path()) {
                files.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}
