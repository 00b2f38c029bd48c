//! A model's weights in the files that others write: one safetensors file, or a folder in the
//! Hugging Face layout.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::Value;

use crate::header::Header;
use crate::{CheckpointError, file};

const ONE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// More than the index of any model.
const INDEX_BYTES_MAX: u64 = 1 << 30;
/// Elements that are read at once.
const BLOCK: usize = 1 << 18;

/// Weights that are read by name. Links are followed: the user named the files.
#[derive(Debug)]
pub struct WeightFiles {
    files: Vec<Opened>,
    /// Which file a tensor is in.
    by_name: BTreeMap<String, usize>,
}

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    header: Header,
}

impl WeightFiles {
    /// Opens a safetensors file, or those of a folder: `model.safetensors`, or the files that
    /// `model.safetensors.index.json` lists.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let paths = if path.is_dir() { of_folder(path)? } else { vec![path.to_owned()] };
        let (mut files, mut by_name) = (Vec::new(), BTreeMap::new());
        for path in paths {
            let file = open(&path).map_err(CheckpointError::io("open", &path))?;
            let header = Header::read(&file, &path)?;
            for name in header.names() {
                if by_name.insert(name.clone(), files.len()).is_some() {
                    let problem = format!("has `{name}`, which another file has too");
                    return Err(CheckpointError::file(&path, problem));
                }
            }
            files.push(Opened { path, file, header });
        }
        Ok(Self { files, by_name })
    }

    /// The tensors' names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// The dtype and the shape of a tensor; `None` if there is none of this name.
    pub fn find(&self, name: &str) -> Option<(Dtype, &[usize])> {
        let file = &self.files[*self.by_name.get(name)?];
        let (info, _) = file.header.tensor(name)?;
        Some((info.dtype, &info.shape))
    }

    /// Reads all elements of a tensor, widened to f32.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Asked`] if there is no such tensor, or if its elements are not F32, BF16
    /// or F16, or not as many as `values`; else if the system refuses.
    pub fn read(&self, name: &str, values: &mut [f32]) -> Result<(), CheckpointError> {
        let asked =
            |problem: String| CheckpointError::Asked { tensor: format!("`{name}`"), problem };
        let Some(Opened { path, file, header }) =
            self.by_name.get(name).map(|index| &self.files[*index])
        else {
            return Err(asked("no file has it".into()));
        };
        let (info, start) = header.tensor(name).expect("names are those of headers");
        let size = match info.dtype {
            Dtype::F32 => 4,
            Dtype::BF16 | Dtype::F16 => 2,
            other => return Err(asked(format!("its elements are {other}, not F32, BF16 or F16"))),
        };
        let bytes = info.data_offsets.1 - info.data_offsets.0;
        if bytes != values.len() * size {
            return Err(asked(format!("it has {bytes} bytes, not {} elements", values.len())));
        }
        let mut words = vec![0_u64; (BLOCK.min(values.len()) * size).div_ceil(8)];
        for (index, values) in values.chunks_mut(BLOCK).enumerate() {
            let block = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..values.len() * size];
            file.read_exact_at(block, start + (index * BLOCK * size) as u64)
                .map_err(CheckpointError::io("read", path))?;
            match info.dtype {
                Dtype::BF16 => {
                    bytemuck::cast_slice::<u8, bf16>(block).convert_to_f32_slice(values);
                }
                Dtype::F16 => bytemuck::cast_slice::<u8, f16>(block).convert_to_f32_slice(values),
                _ => values.copy_from_slice(bytemuck::cast_slice(block)),
            }
        }
        Ok(())
    }
}

/// A regular file; nothing else is waited for.
fn open(path: &Path) -> io::Result<File> {
    match fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::other("it is no regular file")),
    }
}

fn of_folder(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let index = folder.join(INDEX);
    if !index.is_file() {
        return Ok(vec![folder.join(ONE)]);
    }
    let refuse = |problem: &str| CheckpointError::file(&index, problem);
    let io = || CheckpointError::io("read", &index);
    if fs::metadata(&index).map_err(io())?.len() > INDEX_BYTES_MAX {
        return Err(refuse("is too long for an index"));
    }
    let text = fs::read(&index).map_err(io())?;
    let read: Value = serde_json::from_slice(&text).map_err(|_| refuse("is no JSON"))?;
    let map = read["weight_map"].as_object().ok_or_else(|| refuse("has no `weight_map`"))?;
    let names: Option<BTreeSet<_>> = map.values().map(Value::as_str).collect();
    let names = names.ok_or_else(|| refuse("has files that are no names"))?;
    let path = |name: &str| {
        file::check_name("file of weights", name)?;
        Ok(folder.join(name))
    };
    names.into_iter().map(path).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::{TensorBytes, write_tensors};

    fn file(path: &Path, name: &str, dtype: Dtype, bytes: &[u8]) {
        let shape = [bytes.len() / (dtype.bitsize() / 8)];
        let tensor = TensorBytes { name, dtype, shape: &shape, bytes };
        write_tensors(path, &[tensor], &HashMap::new()).unwrap();
    }

    #[test]
    fn elements_of_every_dtype_are_widened_from_one_file_or_several() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        // More than a block.
        let long: Vec<f32> = (0..BLOCK + 3).map(|index| index as f32).collect();
        file(&at("1.safetensors"), "long", Dtype::F32, bytemuck::cast_slice(&long));
        file(&at("2.safetensors"), "bf16", Dtype::BF16, &[0x80, 0x3F, 0x00, 0xC0]);
        file(&at("3.safetensors"), "f16", Dtype::F16, &[0x00, 0x3C]);
        let map = r#"{"weight_map": {"long": "1.safetensors", "bf16": "2.safetensors",
            "f16": "3.safetensors"}}"#;
        fs::write(at(INDEX), map).unwrap();
        let weights = WeightFiles::open(folder.path()).unwrap();
        assert_eq!(weights.names().collect::<Vec<_>>(), ["bf16", "f16", "long"]);
        assert_eq!(weights.find("bf16"), Some((Dtype::BF16, &[2][..])));
        for (name, expected) in [("long", &long[..]), ("bf16", &[1.0, -2.0]), ("f16", &[1.0])] {
            let mut values = vec![0.0; expected.len()];
            weights.read(name, &mut values).unwrap();
            assert_eq!(values, expected);
        }
        weights.read("long", &mut [0.0; 2]).unwrap_err();
        weights.read("none", &mut []).unwrap_err();
        let one = WeightFiles::open(&at("2.safetensors")).unwrap();
        assert_eq!(one.names().count(), 1);
    }

    #[test]
    fn an_index_reaches_no_other_folder_and_a_name_is_in_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).unwrap();
        file(&folder.path().join("a.safetensors"), "a", Dtype::U8, &[1]);
        for map in [
            r#"{"weight_map": {"a": "../a.safetensors"}}"#,
            r#"{"weight_map": {"a": 1}}"#,
            r#"{"weight_map": {"a": "none.safetensors"}}"#,
            "{}",
            "no JSON",
        ] {
            fs::write(inner.join(INDEX), map).unwrap();
            WeightFiles::open(&inner).unwrap_err();
        }
        file(&inner.join("b.safetensors"), "a", Dtype::U8, &[1]);
        file(&inner.join("c.safetensors"), "a", Dtype::U8, &[1]);
        let twice = r#"{"weight_map": {"a": "b.safetensors", "b": "c.safetensors"}}"#;
        fs::write(inner.join(INDEX), twice).unwrap();
        let error = WeightFiles::open(&inner).unwrap_err().to_string();
        assert!(error.contains("another file has too"), "{error}");
    }
}
