//! Files that somebody made to harm whoever reads them: an error names the file and the tensor.

use std::fs;
use std::path::{Path, PathBuf};

use oxizero_checkpoint::{Checkpoint, Value};

use crate::sample::{read, saved, sealed_text};

/// The file of the second writer, and what is in it.
fn pieces_file(folder: &Path) -> (PathBuf, Vec<u8>) {
    let path = folder.join("pieces-00001.safetensors");
    let bytes = fs::read(&path).unwrap();
    (path, bytes)
}

/// Asserts that the checkpoint is refused, with an error that has these words.
fn assert_refused(folder: &Path, words: &[&str]) {
    let error = read(folder).unwrap_err().to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}

/// Changes the manifest, and gives it the checksum that it should have.
fn with_manifest(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("manifest.json");
    let mut sealed: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut sealed["content"]);
    fs::write(path, sealed_text(&sealed["content"])).unwrap();
}

/// Replaces the header of the second writer's file by another text.
fn with_header(folder: &Path, change: impl FnOnce(&str) -> String) {
    let (path, bytes) = pieces_file(folder);
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = change(std::str::from_utf8(&bytes[8..end]).unwrap());
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], header.as_bytes(), &bytes[end..]].concat()).unwrap();
}

#[test]
fn a_huge_header_is_not_allocated() {
    for length in [u64::MAX, 1 << 40, 99_999_999, 1 << 12] {
        let (_run, folder) = saved();
        let (path, mut bytes) = pieces_file(&folder);
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(path, bytes).unwrap();
        assert_refused(&folder, &["pieces-00001.safetensors", &length.to_string()]);
    }
}

#[test]
fn truncated_files_are_named() {
    let (_run, folder) = saved();
    let (path, bytes) = pieces_file(&folder);
    for len in [0, 7, 8, 100, bytes.len() - 1] {
        fs::write(&path, &bytes[..len]).unwrap();
        assert_refused(&folder, &["pieces-00001.safetensors", "bytes"]);
    }
    fs::write(&path, [&bytes[..], &[0]].concat()).unwrap();
    assert_refused(&folder, &["pieces-00001.safetensors", "bytes"]);
}

#[test]
fn missing_files_are_named_with_the_tensor() {
    let (_run, folder) = saved();
    fs::remove_file(folder.join("pieces-00001.safetensors")).unwrap();
    assert_refused(&folder, &["the master weights of `a`", "pieces-00001", "is missing"]);
    fs::remove_file(folder.join("manifest.json")).unwrap();
    assert_refused(&folder, &["there is no checkpoint", "manifest.json"]);
}

#[test]
fn exchanged_files_and_flipped_bits_are_seen() {
    let (_run, folder) = saved();
    let (path, bytes) = pieces_file(&folder);
    let other = folder.join("pieces-00002.safetensors");
    fs::rename(&path, folder.join("aside")).unwrap();
    fs::rename(&other, &path).unwrap();
    fs::rename(folder.join("aside"), &other).unwrap();
    assert_refused(&folder, &["the master weights of `a`", "pieces-00001", "is missing"]);
    for at in (0..bytes.len()).rev().take(40) {
        let (_run, folder) = saved();
        let mut bytes = bytes.clone();
        bytes[at] ^= 4;
        fs::write(folder.join("pieces-00001.safetensors"), bytes).unwrap();
        assert_refused(&folder, &["pieces-00001.safetensors", "is not what was written", "`"]);
    }
}

#[test]
fn pieces_that_are_named_for_each_other_are_seen() {
    let (_run, folder) = saved();
    with_header(&folder, |header| {
        let names = ["master/a/2-4", "state.exp_avg/a/2-4"];
        header.replace(names[0], "!").replace(names[1], names[0]).replace('!', names[1])
    });
    assert_refused(&folder, &["the master weights of `a`", "is not what was written"]);
}

#[test]
fn ranges_that_overlap_or_end_outside_are_refused() {
    let offsets = |header: &str, from: &str, to: &str| {
        assert!(header.contains(from), "{header}");
        header.replacen(from, to, 1)
    };
    for to in ["[0,9]", "[0,7]", "[8,0]", "[0,18446744073709551615]", "[-8,8]", "[0,80000]"] {
        let (_run, folder) = saved();
        with_header(&folder, |header| offsets(header, "[0,8]", to));
        assert_refused(&folder, &["pieces-00001.safetensors"]);
    }
}

#[test]
fn dtypes_and_shapes_that_are_others_are_refused() {
    for (from, to) in [("F32", "I32"), ("master/a/2-4", "master/a/2-5"), ("[2]", "[1,1]")] {
        let (_run, folder) = saved();
        with_header(&folder, |header| header.replacen(from, to, 1));
        assert_refused(&folder, &["pieces-00001.safetensors"]);
    }
}

#[test]
fn a_manifest_cannot_name_files_elsewhere() {
    for name in ["../secret", "/etc/passwd", "..", "", "a/b", ".hidden", "a\u{0}b"] {
        let (_run, folder) = saved();
        with_manifest(&folder, |manifest| {
            manifest["tensors"][0]["pieces"][0]["file"] = name.into();
        });
        assert_refused(&folder, &["cannot be the name of a file"]);
    }
    let (run, folder) = saved();
    let (path, bytes) = pieces_file(&folder);
    fs::write(run.path().join("elsewhere"), bytes).unwrap();
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("../elsewhere", &path).unwrap();
    assert_refused(&folder, &["the master weights of `a`", "pieces-00001"]);
}

#[test]
fn a_manifest_whose_pieces_do_not_tile_is_refused() {
    let huge = Value::from(u64::MAX);
    type Change<'a> = &'a dyn Fn(&mut Value);
    let changes: [Change<'_>; 14] = [
        &|tensor| tensor["pieces"][0]["elements"]["end"] = 3.into(),
        &|tensor| tensor["pieces"][1]["elements"]["start"] = 1.into(),
        &|tensor| tensor["pieces"][2]["elements"]["end"] = 8.into(),
        &|tensor| tensor["pieces"][2]["elements"]["end"] = huge.clone(),
        &|tensor| tensor["pieces"][0]["part"] = 1.into(),
        &|tensor| tensor["pieces"][0]["checksums"] = Value::Array(vec![]),
        &|tensor| tensor["pieces"].as_array_mut().unwrap().swap(0, 1),
        &|tensor| drop(tensor["pieces"].as_array_mut().unwrap().remove(1)),
        &|tensor| tensor["pieces"] = Value::Array(vec![]),
        &|tensor| tensor["shape"] = serde_json::json!([7, huge]),
        &|tensor| tensor["shape"] = serde_json::json!([14]),
        &|tensor| tensor["part_shape"] = serde_json::json!([1]),
        &|tensor| tensor["part_shape"] = serde_json::json!([0]),
        &|tensor| tensor["dtype"] = "F4".into(),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let (_run, folder) = saved();
        with_manifest(&folder, |manifest| change(&mut manifest["tensors"][0]));
        let error = read(&folder).unwrap_err().to_string();
        assert!(error.contains("the master weights of `a`"), "change {index}: {error}");
    }
}

#[test]
fn what_a_manifest_says_twice_or_not_at_all_is_refused() {
    type Change<'a> = &'a dyn Fn(&mut Value);
    let changes: [(Change<'_>, &str); 8] = [
        (&|manifest| manifest["params"][1]["name"] = "tied".into(), "`tied` occurs twice"),
        (&|manifest| manifest["tensors"][1]["role"] = "master".into(), "it occurs twice"),
        (&|manifest| manifest["tensors"][1]["role"] = "weights".into(), "not one of weights and"),
        (&|manifest| manifest["tensors"][4]["role"] = "buffer".into(), "not one of weights and"),
        (&|manifest| manifest["tensors"][1]["name"] = "z".into(), "no such parameter"),
        (&|manifest| manifest["block_bytes"] = 24.into(), "block_bytes"),
        (&|manifest| manifest["block_bytes"] = (1_u64 << 40).into(), "block_bytes"),
        (&|manifest| manifest["params"][0]["updates"] = serde_json::json!([]), "updates"),
    ];
    for (change, words) in changes {
        let (_run, folder) = saved();
        with_manifest(&folder, change);
        assert_refused(&folder, &[words]);
    }
}

#[test]
fn a_newer_format_is_said_to_be_newer() {
    let (_run, folder) = saved();
    let path = folder.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("\"version\":1", "\"version\":2", 1)).unwrap();
    assert_refused(&folder, &["manifest.json", "version 2", "this program reads 1"]);
}

#[test]
fn a_deep_manifest_does_not_exhaust_the_stack() {
    let (_run, folder) = saved();
    let path = folder.join("manifest.json");
    fs::write(&path, "[".repeat(1 << 20)).unwrap();
    assert!(Checkpoint::open(&folder).unwrap_err().to_string().contains("manifest.json"));
}
