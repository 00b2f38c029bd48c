//! Whatever the files of a checkpoint hold, reading it panics nobody, and what is read is what was
//! written.
//!
//! The first byte of an input chooses a file, the rest is its content: any bytes, which checksums
//! are to refuse. Beyond the last file it is the content of a manifest, as JSON, which is sealed
//! with a checksum as if it had been written so.
#![no_main]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use oxizero_checkpoint::{Manifest, Value};
use tempfile::TempDir;

#[path = "../tests/checkpoints/sample.rs"]
#[expect(dead_code, reason = "the tests need more of it")]
mod sample;

use sample::{read, sealed_text};

struct Saved {
    _run: TempDir,
    folder: PathBuf,
    files: Vec<(PathBuf, Vec<u8>)>,
    written: (Manifest, Vec<Vec<u8>>),
}

impl Saved {
    fn new() -> Self {
        let (run, folder) = sample::saved();
        let entries = fs::read_dir(&folder).expect("it was written just now");
        let mut paths: Vec<_> = entries.map(|entry| entry.expect("it is there").path()).collect();
        paths.sort();
        let contents = |path: &Path| fs::read(path).expect("it was written just now");
        let files = paths.into_iter().map(|path| (path.clone(), contents(&path))).collect();
        let written = read(&folder).expect("it is whole");
        Self { _run: run, folder, files, written }
    }

    fn manifest(&self) -> usize {
        let is_it = |(path, _): &(PathBuf, Vec<u8>)| path.ends_with("manifest.json");
        self.files.iter().position(is_it).expect("every checkpoint has one")
    }

    /// Reads the checkpoint with another content of one file.
    fn with(&self, file: usize, content: &[u8]) -> Option<(Manifest, Vec<Vec<u8>>)> {
        let (path, original) = &self.files[file];
        fs::write(path, content).expect("the folder can be written to");
        let found = read(&self.folder).ok();
        fs::write(path, original).expect("the folder can be written to");
        found
    }

    /// Writes what there is to begin with to the folder of inputs that the command names.
    fn seed(&self) {
        let Some(inputs) = std::env::args().skip(1).find(|word| !word.starts_with('-')) else {
            return;
        };
        let sealed: Value = serde_json::from_slice(&self.files[self.manifest()].1).expect("JSON");
        let content = sealed["content"].to_string().into_bytes();
        let contents = self.files.iter().map(|(_, bytes)| bytes).chain([&content]);
        for (choice, content) in (0_u8..).zip(contents) {
            let input = [&[choice], &content[..]].concat();
            let path = Path::new(&inputs).join(format!("written-{choice}"));
            fs::write(path, input).expect("the folder can be written to");
        }
    }
}

static SAVED: LazyLock<Saved> = LazyLock::new(Saved::new);

fuzz_target!(init: SAVED.seed(), |input: &[u8]| {
    let Some((choice, content)) = input.split_first() else { return };
    let choice = usize::from(*choice) % (SAVED.files.len() + 1);
    if choice < SAVED.files.len() {
        let found = SAVED.with(choice, content);
        assert!(found.is_none_or(|found| found == SAVED.written), "a wrong number was read");
    } else if let Ok(content) = serde_json::from_slice::<Value>(content) {
        SAVED.with(SAVED.manifest(), sealed_text(&content).as_bytes());
    }
});
