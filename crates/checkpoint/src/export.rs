//! A checkpoint's weights as the files that everybody reads: the Hugging Face layout, of one
//! `model.safetensors`, or several with an index.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use oxizero_core::Part;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde_json::json;

use crate::checkpoint::Checkpoint;
use crate::manifest::{Manifest, Role, Tensor};
use crate::staging::{create, create_synced};
use crate::{CheckpointError, file, header};

/// How weights are exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// What parameters are rounded to, to nearest even; each to the dtype of its model weight where
    /// there is none. F32, BF16 or F16.
    pub dtype: Option<Dtype>,
    /// The most bytes of tensors in a file; a larger tensor has a file of its own.
    pub shard_bytes: usize,
}

/// A tensor that is exported.
struct Exported {
    /// Its index in the checkpoint.
    tensor: usize,
    name: String,
    dtype: Dtype,
    bytes: usize,
}

impl Checkpoint {
    /// Writes the weights of all parameters, and the model's buffers, to `folder`, which must not
    /// be there yet or be empty. A tied parameter is stored once, under its first name. Memory of
    /// a few blocks is used, whatever the sizes of tensors and files.
    ///
    /// Returns the files' names, the index among them. The folder has its name when all of it is
    /// on the disk.
    pub fn export(
        &mut self,
        folder: &Path,
        options: ExportOptions,
    ) -> Result<Vec<String>, CheckpointError> {
        let exported = exported(self, options)?;
        self.check_files(exported.iter().map(|one| one.tensor))?;
        let aside = aside(folder)?;
        let shards = shards(exported, options.shard_bytes);
        let written = self.write_shards(&aside, &shards);
        let named = written.and_then(|names| {
            file::sync_folder(&aside)?;
            fs::rename(&aside, folder).map_err(CheckpointError::io("rename to", folder))?;
            file::sync_folder(file::parent(folder))?;
            Ok(names)
        });
        if named.is_err() {
            let _gone = fs::remove_dir_all(&aside);
        }
        named
    }

    fn write_shards(
        &mut self,
        folder: &Path,
        shards: &[Vec<Exported>],
    ) -> Result<Vec<String>, CheckpointError> {
        let name = |index: usize| match shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
        };
        let mut names: Vec<_> = (0..shards.len()).map(name).collect();
        for (name, shard) in names.iter().zip(shards) {
            self.write_shard(&folder.join(name), shard)?;
        }
        if shards.len() > 1 {
            let of_shard = |(name, shard): (&String, &Vec<Exported>)| {
                let file = name.clone();
                shard.iter().map(move |one| (one.name.clone(), file.clone())).collect::<Vec<_>>()
            };
            let map: BTreeMap<_, _> = names.iter().zip(shards).flat_map(of_shard).collect();
            let total: usize = shards.iter().flatten().map(|one| one.bytes).sum();
            let index = json!({"metadata": {"total_size": total}, "weight_map": map});
            let name = "model.safetensors.index.json";
            create_synced(&folder.join(name), format!("{index:#}\n").as_bytes())?;
            names.push(name.into());
        }
        Ok(names)
    }

    fn write_shard(&mut self, path: &Path, shard: &[Exported]) -> Result<(), CheckpointError> {
        let mut end = 0;
        let info = |one: &Exported| {
            let start = end;
            end += one.bytes;
            let shape = self.manifest().tensors[one.tensor].shape.clone();
            (one.name.clone(), TensorInfo { dtype: one.dtype, shape, data_offsets: (start, end) })
        };
        let infos = shard.iter().map(info).collect();
        // The entry that says to `transformers` which framework's layout this is.
        let head = header::encode([("format".into(), "pt".into())].into(), infos, path)?;
        let file = create(path)?;
        file.write_all_at(&head, 0).map_err(CheckpointError::io("write", path))?;
        let mut start = head.len() as u64;
        for one in shard {
            self.write_tensor((&file, path), start, one)?;
            start += one.bytes as u64;
        }
        file::sync(&file, path)
    }

    fn write_tensor(
        &mut self,
        (file, path): (&File, &Path),
        start: u64,
        one: &Exported,
    ) -> Result<(), CheckpointError> {
        let stored = &self.manifest().tensors[one.tensor];
        let (from, part, size) = (stored.dtype, Part::all(&stored.shape), one.dtype.bitsize() / 8);
        let (mut written, mut rounded) = (Ok(()), Vec::new());
        let numel = part.numel().0;
        self.read(one.tensor, (&part, 0..numel), &mut |at, bytes| {
            let bytes = if from == one.dtype {
                bytes
            } else {
                round(bytes, from, one.dtype, &mut rounded);
                &rounded
            };
            if written.is_ok() {
                written = file.write_all_at(bytes, start + (at * size) as u64);
            }
        })?;
        written.map_err(CheckpointError::io("write", path))
    }
}

/// What is exported, in the order of the parameters; buffers after them.
fn exported(
    checkpoint: &Checkpoint,
    options: ExportOptions,
) -> Result<Vec<Exported>, CheckpointError> {
    let manifest = checkpoint.manifest();
    let of = |(tensor, dtype): (usize, Option<Dtype>)| {
        let stored: &Tensor = &manifest.tensors[tensor];
        let dtype = dtype.unwrap_or(stored.dtype);
        let is_float = |dtype| matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
        if dtype != stored.dtype && !(is_float(dtype) && is_float(stored.dtype)) {
            let problem = format!("its {} elements cannot be rounded to {dtype}", stored.dtype);
            return Err(CheckpointError::Asked { tensor: stored.to_string(), problem });
        }
        let bytes = stored.numel().0 * (dtype.bitsize() / 8);
        Ok(Exported { tensor, name: stored.name.clone(), dtype, bytes })
    };
    let params = manifest.params.iter().filter_map(|param| {
        let dtype = options.dtype.unwrap_or(param.dtype);
        Some((checkpoint.weights_of(&param.name)?, Some(dtype)))
    });
    let exported: Vec<_> = params.chain(buffers(manifest)).map(of).collect::<Result<_, _>>()?;
    let mut names = HashSet::new();
    match exported.iter().find(|one| !names.insert(one.name.as_str())) {
        Some(one) => {
            let problem = "a parameter has this name too".into();
            let tensor = manifest.tensors[one.tensor].to_string();
            Err(CheckpointError::Asked { tensor, problem })
        }
        None => Ok(exported),
    }
}

fn buffers(manifest: &Manifest) -> impl Iterator<Item = (usize, Option<Dtype>)> {
    let tensors = manifest.tensors.iter().enumerate();
    tensors.filter(|(_, tensor)| tensor.role == Role::Buffer).map(|(index, _)| (index, None))
}

/// Tensors that are in one file, in order.
fn shards(exported: Vec<Exported>, bytes_max: usize) -> Vec<Vec<Exported>> {
    let (mut shards, mut bytes) = (vec![Vec::new()], 0);
    for one in exported {
        let shard = shards.last_mut().expect("there is one from the start");
        if !shard.is_empty() && bytes + one.bytes > bytes_max {
            bytes = one.bytes;
            shards.push(vec![one]);
        } else {
            bytes += one.bytes;
            shard.push(one);
        }
    }
    for shard in &mut shards {
        // Wide elements first, so that all are aligned.
        shard.sort_by_key(|one| std::cmp::Reverse(one.dtype.bitsize()));
    }
    shards
}

/// Rounds floating-point elements to another dtype, to nearest even.
fn round(bytes: &[u8], from: Dtype, to: Dtype, rounded: &mut Vec<u8>) {
    let wide: Vec<f32> = match from {
        Dtype::BF16 => bytemuck::cast_slice::<u8, bf16>(bytes).to_f32_vec(),
        Dtype::F16 => bytemuck::cast_slice::<u8, f16>(bytes).to_f32_vec(),
        _ => bytemuck::cast_slice(bytes).to_vec(),
    };
    rounded.clear();
    match to {
        Dtype::BF16 => {
            let mut narrow = vec![bf16::ZERO; wide.len()];
            narrow.convert_from_f32_slice(&wide);
            rounded.extend_from_slice(bytemuck::cast_slice(&narrow));
        }
        Dtype::F16 => {
            let mut narrow = vec![f16::ZERO; wide.len()];
            narrow.convert_from_f32_slice(&wide);
            rounded.extend_from_slice(bytemuck::cast_slice(&narrow));
        }
        _ => rounded.extend_from_slice(bytemuck::cast_slice(&wide)),
    }
}

/// A new folder beside the one that it will be.
fn aside(folder: &Path) -> Result<PathBuf, CheckpointError> {
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
        || folder.symlink_metadata().is_ok_and(|data| !data.is_dir())
    {
        return Err(CheckpointError::file(folder, "is there already, and is no empty folder"));
    }
    let (parent, aside) = file::aside(folder)?;
    fs::create_dir_all(parent).map_err(CheckpointError::io("create", parent))?;
    fs::create_dir(&aside).map_err(CheckpointError::io("create", &aside))?;
    Ok(aside)
}
