//! Text files of a folder, in an order that does not depend on the file system.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::error::CliError;
use crate::run_folder;

/// The text files found under a path.
#[derive(Debug, Default)]
pub(super) struct TextFiles {
    /// Their contents, sorted by path.
    pub(super) texts: Vec<Vec<u8>>,
    /// Files that are no text: they hold a NUL byte, or are not UTF-8.
    pub(super) skipped: usize,
    /// Files and folders that were not looked into; see [`List`].
    pub(super) left_out: usize,
}

/// The files under a path.
#[derive(Debug, Default)]
pub(super) struct List {
    /// Sorted.
    pub(super) files: Vec<PathBuf>,
    /// Hidden files and folders, caches (such as cargo's `target`), and what runs have left.
    pub(super) left_out: usize,
}

impl TextFiles {
    /// Reads one file, or every file of a folder and its subfolders but what [`List`] leaves out.
    pub(super) fn read(path: &Path) -> Result<Self, CliError> {
        let List { files, left_out } = List::of(path, &|_| true)?;
        let mut found = Self { left_out, ..Self::default() };
        for file in files {
            found.push(read_file(&file)?);
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

impl List {
    /// The files under `path` that are `wanted`; links to folders are not followed. The path
    /// itself is not left out, whatever it is.
    pub(super) fn of(path: &Path, wanted: &dyn Fn(&Path) -> bool) -> Result<Self, CliError> {
        let mut list = Self::default();
        if !fs::metadata(path).map_err(CliError::path("read", path))?.is_dir() {
            list.files.push(path.to_path_buf());
            return Ok(list);
        }
        let mut open = vec![path.to_path_buf()];
        while let Some(folder) = open.pop() {
            for entry in fs::read_dir(&folder).map_err(CliError::path("read", &folder))? {
                let entry = entry.map_err(CliError::path("read", &folder))?;
                let path = entry.path();
                let kind = entry.file_type().map_err(CliError::path("read", &path))?;
                let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
                if is_hidden || kind.is_dir() && (is_cache(&path) || run_folder::is_output(&path)) {
                    list.left_out += 1;
                } else if kind.is_dir() {
                    open.push(path);
                } else if path.is_file() && wanted(&path) {
                    list.files.push(path);
                }
            }
        }
        list.files.sort();
        Ok(list)
    }
}

/// Whether the folder says of itself that its files can be made again.
fn is_cache(folder: &Path) -> bool {
    folder.join("CACHEDIR.TAG").is_file()
}

/// A file's content. What is no regular file may never end, or never begin.
pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>, CliError> {
    let metadata = fs::metadata(path).map_err(CliError::path("read", path))?;
    if !metadata.is_file() {
        let why = io::Error::other("it is not a regular file");
        return Err(CliError::path("read", path)(why));
    }
    fs::read(path).map_err(CliError::path("read", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_files_caches_and_results_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let files = [
            "b/text",
            "a",
            "c/d/e", // these are read
            ".git/x",
            "b/.hidden",
            "target/CACHEDIR.TAG",
            "target/x",
            "out/metrics.jsonl",
            "out/x",
        ];
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "text").unwrap();
        }
        let list = List::of(folder.path(), &|_| true).unwrap();
        assert_eq!(list.files, ["a", "b/text", "c/d/e"].map(|file| folder.path().join(file)));
        assert_eq!(list.left_out, 4);
        assert_eq!(List::of(&folder.path().join("out"), &|_| true).unwrap().files.len(), 2);
    }
}
