//! Runs the command on small models and texts.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A model of a few thousand elements, three steps on one thread a rank.
pub(crate) const TINY: &str = r#"
[model]
hidden_size = 16
intermediate_size = 24
layers = 2
heads = 2
kv_heads = 1
context = 16

[schedule]
warmup_steps = 1

[train]
steps = 3
micro_batch_size = 2
eval_batches = 3

[data]
path = "text.txt"

[run]
threads_per_rank = 1
"#;

/// A folder with a small configuration and a small text, in which the command runs.
pub(crate) struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().expect("a temporary folder") };
        place.write("tiny.toml", TINY);
        let verse = |n| format!("Verse {n}: the {n}th of many lines.\n{n} more to come.\n\n");
        place.write("text.txt", &(0..200).map(verse).collect::<String>());
        place
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text).expect("the temporary folder is writable");
        path
    }

    /// The command, to be run in the folder.
    pub(crate) fn command(&self, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oxizero"));
        command.args(words.split_whitespace()).current_dir(self.path());
        command
    }

    pub(crate) fn run(&self, words: &str) -> Output {
        self.command(words).output().expect("the command starts")
    }

    /// Runs the command, which must succeed, and reads one JSON object a line.
    pub(crate) fn events(&self, words: &str) -> Vec<serde_json::Value> {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}: {said}");
        let lines = String::from_utf8(output.stdout).expect("JSON is UTF-8");
        lines.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }
}
