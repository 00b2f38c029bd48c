//! Weights in the layout that others read.

use std::fs;
use std::path::Path;

use oxizero_checkpoint::{Checkpoint, Dtype, ExportOptions, Value};
use safetensors::SafeTensors;

use crate::sample::{manifest, saved, whole};

fn export(checkpoint: &Path, out: &Path, dtype: Option<Dtype>, shard_bytes: usize) -> Vec<String> {
    let options = ExportOptions { dtype, shard_bytes };
    Checkpoint::open(checkpoint).unwrap().export(out, options).unwrap()
}

/// A tensor's dtype, shape and bytes, by name.
type Found = (String, Dtype, Vec<usize>, Vec<u8>);

fn tensors(path: &Path) -> Vec<Found> {
    let text = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&text).unwrap();
    let found = file.iter().map(|(name, tensor)| {
        (name.to_owned(), tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec())
    });
    let mut found: Vec<_> = found.collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

/// To bf16, by the bits of an f32; the sample's are far from the largest.
fn rounded(bytes: &[u8]) -> Vec<u8> {
    let round = |bytes: &[u8]| {
        let bits = u32::from_le_bytes(bytes.try_into().unwrap());
        ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
    };
    bytes.chunks(4).flat_map(|bytes| round(bytes).to_le_bytes()).collect()
}

#[test]
fn each_parameter_has_the_dtype_of_its_model_weight() {
    let (run, folder) = saved();
    let out = run.path().join("new").join("out");
    assert_eq!(export(&folder, &out, None, 1 << 20), ["model.safetensors"]);
    let written = manifest(5);
    let found = tensors(&out.join("model.safetensors"));
    let names: Vec<_> = found.iter().map(|found| found.0.as_str()).collect();
    assert_eq!(names, ["", "a", "b/0-3", "frozen", "positions"]);
    assert_eq!(found[3], ("frozen".into(), Dtype::BF16, vec![3, 11], whole(&written, 4)));
    assert_eq!(found[2].1, Dtype::BF16);
    assert_eq!(found[2].3, rounded(&whole(&written, 2)), "rounded masters, from parts");
    assert_eq!(fs::read_dir(out.parent().unwrap()).unwrap().count(), 1, "nothing is left aside");
}

#[test]
fn shards_have_an_index() {
    let (run, folder) = saved();
    let out = run.path().join("out");
    let names = export(&folder, &out, Some(Dtype::F32), 150);
    assert_eq!(names.len(), 3);
    assert_eq!(names[0], "model-00001-of-00002.safetensors");
    let index: Value = serde_json::from_slice(&fs::read(out.join(&names[2])).unwrap()).unwrap();
    let files = [tensors(&out.join(&names[0])), tensors(&out.join(&names[1]))];
    let total: usize = files.iter().flatten().map(|(.., bytes)| bytes.len()).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    for (file, name) in files.iter().zip(&names) {
        for (tensor, ..) in file {
            assert_eq!(index["weight_map"][tensor], **name);
        }
    }
    let masters = &files[0].iter().find(|found| found.0 == "b/0-3").unwrap().3;
    assert_eq!(*masters, whole(&manifest(5), 2));
}

#[test]
fn a_folder_in_use_and_a_damaged_checkpoint_are_refused_and_nothing_is_left() {
    let (run, folder) = saved();
    let options = ExportOptions { dtype: None, shard_bytes: 1 << 20 };
    let mut checkpoint = Checkpoint::open(&folder).unwrap();
    let error = checkpoint.export(&folder, options).unwrap_err().to_string();
    assert!(error.contains("no empty folder"), "{error}");
    let path = folder.join("pieces-00000.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let out = run.path().join("out");
    let error = checkpoint.export(&out, options).unwrap_err().to_string();
    assert!(error.contains("pieces-00000.safetensors"), "{error}");
    let entries = fs::read_dir(run.path()).unwrap().count();
    assert_eq!(entries, 2, "the checkpoint and `latest`");
}
