//! The folder that a run leaves behind: `config.toml`, `metrics.jsonl`, `model.safetensors`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use oxizero_core::{Config, DType};
use safetensors::tensor::{Dtype, TensorView};

use crate::error::CliError;
use crate::progress::Event;

/// Where runs go that name no folder.
const RUNS: &str = "runs";

/// Makes the run's folder, new or empty, and writes the configuration in full.
pub(crate) fn create(config: &Config) -> Result<PathBuf, CliError> {
    let folder = match &config.run.folder {
        Some(folder) => claim(Path::new(folder))?,
        None => next_free(Path::new(RUNS))?,
    };
    let path = folder.join("config.toml");
    fs::write(&path, config.to_toml()).map_err(CliError::path("write", &path))?;
    Ok(folder)
}

/// The folder itself, if nothing is in it.
fn claim(folder: &Path) -> Result<PathBuf, CliError> {
    fs::create_dir_all(folder).map_err(CliError::path("create the run folder", folder))?;
    let mut entries = fs::read_dir(folder).map_err(CliError::path("read", folder))?;
    if entries.next().is_some() {
        let why = io::Error::other("it is not empty, and a run overwrites nothing");
        return Err(CliError::path("use the run folder", folder)(why));
    }
    Ok(folder.to_path_buf())
}

/// `runs/0001`, or the first number after that is free. Making the folder is what claims it, so
/// that two runs that start together do not share one.
fn next_free(runs: &Path) -> Result<PathBuf, CliError> {
    fs::create_dir_all(runs).map_err(CliError::path("create", runs))?;
    for number in 1_u64.. {
        let folder = runs.join(format!("{number:04}"));
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(CliError::path("create", folder)(error)),
        }
    }
    unreachable!("a folder holds fewer than 2^64 others")
}

/// Appends events to `metrics.jsonl`.
#[derive(Debug)]
pub(crate) struct Metrics {
    file: BufWriter<File>,
}

impl Metrics {
    /// Creates the file.
    pub(crate) fn create(folder: &Path) -> io::Result<Self> {
        Ok(Self { file: BufWriter::new(File::create_new(folder.join("metrics.jsonl"))?) })
    }

    /// Writes one line; it is in the file when this returns.
    pub(crate) fn add(&mut self, event: &Event) -> io::Result<()> {
        serde_json::to_writer(&mut self.file, event)?;
        self.file.write_all(b"\n")?;
        self.file.flush()
    }
}

/// One tensor of a model, whole.
#[derive(Debug)]
pub(crate) struct Tensor {
    /// As on the Hugging Face hub.
    pub(crate) name: String,
    /// The dtype of `bytes`.
    pub(crate) dtype: DType,
    /// The tensor's shape.
    pub(crate) shape: Vec<usize>,
    /// The elements, row by row, little-endian.
    pub(crate) bytes: Vec<u8>,
}

/// Writes `model.safetensors` aside, syncs it, and renames it, so that the name never stands for
/// half a file.
pub(crate) fn save_model(folder: &Path, tensors: &[Tensor]) -> io::Result<PathBuf> {
    let views = tensors.iter().map(|tensor| {
        let dtype = match tensor.dtype {
            DType::F32 => Dtype::F32,
            DType::Bf16 => Dtype::BF16,
            DType::F16 => Dtype::F16,
        };
        let view = TensorView::new(dtype, tensor.shape.clone(), &tensor.bytes);
        Ok((tensor.name.as_str(), view.map_err(io::Error::other)?))
    });
    let views = views.collect::<io::Result<Vec<_>>>()?;
    // The entry that says to `transformers` which framework's layout this is.
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    let (aside, path) = (folder.join("model.safetensors.new"), folder.join("model.safetensors"));
    // The library leaves a file that only its owner can read; this one is as readable as others.
    let permissions = File::create(&aside)?.metadata()?.permissions();
    safetensors::serialize_to_file(views, Some(metadata), &aside).map_err(io::Error::other)?;
    fs::set_permissions(&aside, permissions)?;
    File::open(&aside)?.sync_all()?;
    fs::rename(&aside, &path)?;
    File::open(folder)?.sync_all()?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_use_is_refused_and_numbers_are_not_given_twice() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b");
        assert_eq!(claim(&folder).unwrap(), folder);
        claim(&folder).unwrap();
        fs::write(folder.join("x"), "").unwrap();
        assert!(claim(&folder).unwrap_err().to_string().contains("not empty"));
        assert!(next_free(root.path()).unwrap().ends_with("0001"));
        assert!(next_free(root.path()).unwrap().ends_with("0002"));
    }

    #[test]
    fn a_saved_model_reads_back_and_leaves_nothing_aside() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> =
            [0x3F80_u16, 0x4000].iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let tensor =
            Tensor { name: "a.weight".into(), dtype: DType::Bf16, shape: vec![2, 1], bytes };
        let path = save_model(folder.path(), &[tensor]).unwrap();
        let file = fs::read(path).unwrap();
        let read = safetensors::SafeTensors::deserialize(&file).unwrap();
        let tensor = read.tensor("a.weight").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::BF16, &[2, 1][..]));
        assert_eq!(tensor.data(), [0x80, 0x3F, 0x00, 0x40]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
