//! Ten thousand checkpoints, each with something changed: what is read of one is what was written,
//! or an error.

use std::fs;
use std::io::Write;
use std::path::Path;

use oxizero_checkpoint::{Manifest, Value};
use oxizero_core::Random;

use crate::sample::{read, saved, sealed_text};

const CHECKPOINTS: u64 = 10_000;

struct Draw(Random);

impl Draw {
    fn below(&mut self, count: usize) -> usize {
        (self.0.next_u64() % count.max(1) as u64) as usize
    }

    /// A range of at most 40 of so many.
    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len);
        start..(start + 1 + self.below(40)).min(len)
    }
}

/// Changes a file's bytes somehow.
fn mutate(draw: &mut Draw, bytes: &mut Vec<u8>, other: &[u8]) {
    let len = bytes.len();
    match draw.below(9) {
        0 => bytes[draw.below(len)] ^= 1 << draw.below(8),
        1 => bytes[draw.below(len)] = draw.0.next_u64() as u8,
        2 => bytes.truncate(draw.below(len)),
        3 => bytes.extend_from_within(draw.range(len)),
        4 => drop(bytes.drain(draw.range(len))),
        5 => {
            let range = draw.range(len);
            bytes[range].fill(draw.0.next_u64() as u8);
        }
        6 => {
            let (from, to) = (draw.range(len), draw.below(len));
            let moved: Vec<_> = bytes[from].to_vec();
            bytes.splice(to..to, moved);
        }
        7 => {
            let (a, b) = (draw.below(len), draw.below(len));
            bytes.swap(a, b);
        }
        _ => {
            let from = draw.range(other.len());
            let to = draw.below(len);
            let end = (to + from.len()).min(len);
            bytes[to..end].copy_from_slice(&other[from.start..from.start + (end - to)]);
        }
    }
}

/// Writes a file over the one that is there: to empty it first makes some file systems wait for
/// the disk.
fn overwrite(path: &Path, bytes: &[u8]) {
    let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    file.write_all(bytes).unwrap();
}

type Read = (Manifest, Vec<Vec<u8>>);

fn assert_as_written_or_refused(folder: &Path, written: &Read, seed: u64) {
    match read(folder) {
        Ok(found) => assert!(found == *written, "seed {seed}: a wrong number was taken for right"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

#[test]
fn a_mutated_checkpoint_gives_an_error_or_what_was_written() {
    let (_run, folder) = saved();
    let written = read(&folder).unwrap();
    let paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let originals: Vec<_> = paths.iter().map(|path| fs::read(path).unwrap()).collect();
    for seed in 0..CHECKPOINTS {
        let mut draw = Draw(Random::for_path(seed, &[]));
        let (file, other) = (draw.below(paths.len()), draw.below(paths.len()));
        let mut bytes = originals[file].clone();
        for _ in 0..1 + draw.below(3) {
            if !bytes.is_empty() {
                mutate(&mut draw, &mut bytes, &originals[other]);
            }
        }
        overwrite(&paths[file], &bytes);
        assert_as_written_or_refused(&folder, &written, seed);
        overwrite(&paths[file], &originals[file]);
    }
    assert!(read(&folder).unwrap() == written);
}

/// Goes to some value in a tree.
fn somewhere<'a>(draw: &mut Draw, mut value: &'a mut Value) -> &'a mut Value {
    loop {
        let children = match &*value {
            Value::Array(items) => items.len(),
            Value::Object(fields) => fields.len(),
            _ => 0,
        };
        if children == 0 || draw.below(8) == 0 {
            return value;
        }
        let child = draw.below(children);
        value = match value {
            Value::Array(items) => &mut items[child],
            Value::Object(fields) => fields.values_mut().nth(child).unwrap(),
            _ => unreachable!("it has children"),
        };
    }
}

#[test]
fn a_manifest_that_somebody_made_up_panics_nobody() {
    let (_run, folder) = saved();
    let path = folder.join("manifest.json");
    let sealed: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let large = [u64::MAX, 1 << 63, 1 << 62, 1 << 40, 1 << 20, 65, 4, 2, 1, 0];
    let mut refused = 0;
    for seed in 0..CHECKPOINTS / 4 {
        let mut draw = Draw(Random::for_path(seed, &[1]));
        let mut content = sealed["content"].clone();
        for _ in 0..1 + draw.below(2) {
            let copy = somewhere(&mut draw, &mut content.clone()).clone();
            let at = somewhere(&mut draw, &mut content);
            let fresh = match draw.below(6) {
                0 => Value::Null,
                1 => Value::from(-1),
                2 => Value::from("../x"),
                3 => copy,
                _ => Value::from(large[draw.below(large.len())]),
            };
            *at = fresh;
        }
        overwrite(&path, sealed_text(&content).as_bytes());
        refused += usize::from(read(&folder).is_err());
    }
    assert!(refused > 1000, "only {refused} were refused");
}
