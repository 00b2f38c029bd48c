//! The folder that a run leaves behind: `config.toml`, `metrics.jsonl`, `model.safetensors`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use oxizero_core::{Config, DType, counted};
use safetensors::tensor::{Dtype, TensorView};

use crate::checkpoints;
use crate::error::CliError;
use crate::progress::Event;

/// Where runs go that name no folder.
const RUNS: &str = "runs";
const CONFIG: &str = "config.toml";
const METRICS: &str = "metrics.jsonl";
const MODEL: &str = "model.safetensors";
/// The model while it is written.
const ASIDE: &str = "model.safetensors.new";

/// A run's folder, which no other run uses.
#[derive(Debug)]
pub(crate) struct RunFolder {
    path: PathBuf,
    /// The folders that were made for it, the innermost first.
    made: Vec<PathBuf>,
}

/// Whether a folder is where runs go, or holds what one has left.
pub(crate) fn is_output(folder: &Path) -> bool {
    let is_runs = || Some(fs::canonicalize(folder).ok()? == fs::canonicalize(RUNS).ok()?);
    folder.join(METRICS).is_file() || is_runs() == Some(true)
}

/// Where a run keeps its configuration.
pub(crate) fn config_path(folder: &Path) -> PathBuf {
    folder.join(CONFIG)
}

impl RunFolder {
    /// Makes the run's folder, new or empty, and writes the configuration in full.
    pub(crate) fn create(config: &Config) -> Result<Self, CliError> {
        let folder = match &config.run.folder {
            Some(folder) => Self::claim(Path::new(folder))?,
            None => Self::next_free(Path::new(RUNS))?,
        };
        folder.write_config(&config.to_toml())?;
        Ok(folder)
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The folder itself, if nothing is in it.
    fn claim(path: &Path) -> Result<Self, CliError> {
        let made = missing(path);
        fs::create_dir_all(path).map_err(CliError::path("create the run folder", path))?;
        let mut entries = fs::read_dir(path).map_err(CliError::path("read", path))?;
        if entries.next().is_some() {
            return Err(in_use(path));
        }
        Ok(Self { path: path.to_path_buf(), made })
    }

    /// `runs/0001`, or the first number after that is free. Making the folder is what claims it,
    /// so that two runs that start together do not share one.
    fn next_free(runs: &Path) -> Result<Self, CliError> {
        let made = missing(runs);
        fs::create_dir_all(runs).map_err(CliError::path("create", runs))?;
        for number in 1_u64.. {
            let path = runs.join(format!("{number:04}"));
            match fs::create_dir(&path) {
                Ok(()) => {
                    let made = [vec![path.clone()], made].concat();
                    return Ok(Self { path, made });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(CliError::path("create", path)(error)),
            }
        }
        unreachable!("a folder holds fewer than 2^64 others")
    }

    /// Making this file is what claims a folder that was there.
    fn write_config(&self, config: &str) -> Result<(), CliError> {
        let path = self.path.join(CONFIG);
        let mut file = File::create_new(&path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => in_use(&self.path),
            _ => CliError::path("write", &path)(error),
        })?;
        let written = file.write_all(config.as_bytes());
        if written.is_err() {
            self.remove_unless_trained();
        }
        written.map_err(CliError::path("write", &path))
    }

    /// Takes back what was made, unless a step was taken: a run that did not start must not be in
    /// the way of the next attempt.
    pub(crate) fn remove_unless_trained(&self) {
        if self.steps() > 0 {
            return;
        }
        // What cannot be removed, or is not empty because somebody else uses it, stays.
        let _stays = fs::remove_file(self.path.join(METRICS));
        let _stays = fs::remove_file(self.path.join(CONFIG));
        let _stays = self.made.iter().try_for_each(fs::remove_dir);
    }

    /// Takes back what an interrupted run has not finished, and says what it leaves.
    pub(crate) fn interrupted(&self) -> String {
        // There is one only where the interrupt came while it was written.
        let _none = fs::remove_file(self.path.join(ASIDE));
        self.remove_unless_trained();
        let folder = self.path.display();
        match (self.steps(), self.path.join(MODEL).exists()) {
            (0, _) => "no step was taken".into(),
            (steps, false) => match checkpoints::of_run(&self.path).latest() {
                Ok(name) => format!(
                    "the checkpoint {name} is in `{folder}`; go on with `oxizero train --resume \
                     {folder}`"
                ),
                Err(_) => {
                    format!("metrics up to step {steps} are in `{folder}`, no weights were written")
                }
            },
            (steps, true) => {
                let steps = counted(steps, "step");
                format!("weights and metrics of {steps} are in `{folder}`")
            }
        }
    }

    /// Steps that were taken, by the metrics: they have a line for each.
    fn steps(&self) -> usize {
        steps(&self.path)
    }
}

/// Whether the run in `folder` has taken a step.
pub(crate) fn has_trained(folder: &Path) -> bool {
    steps(folder) > 0
}

fn steps(folder: &Path) -> usize {
    let events = fs::read_to_string(folder.join(METRICS)).unwrap_or_default();
    events.lines().filter(|event| event.starts_with(r#"{"event":"step""#)).count()
}

/// The folders on the way to `path`, itself included, that are not there, the innermost first.
fn missing(path: &Path) -> Vec<PathBuf> {
    let folders = path.ancestors().take_while(|folder| !folder.as_os_str().is_empty());
    folders.take_while(|folder| !folder.exists()).map(Path::to_path_buf).collect()
}

fn in_use(folder: &Path) -> CliError {
    let why = io::Error::other("it is not empty, and a run overwrites nothing");
    CliError::path("use the run folder", folder)(why)
}

/// Appends events to `metrics.jsonl`.
#[derive(Debug)]
pub(crate) struct Metrics {
    file: BufWriter<File>,
}

impl Metrics {
    /// Creates the file.
    pub(crate) fn create(folder: &Path) -> io::Result<Self> {
        Ok(Self { file: BufWriter::new(File::create_new(folder.join(METRICS))?) })
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
/// half a file; on a full disk, nothing is left of it.
pub(crate) fn save_model(folder: &Path, tensors: &[Tensor]) -> io::Result<PathBuf> {
    let (aside, path) = (folder.join(ASIDE), folder.join(MODEL));
    let saved = write_model(&aside, tensors).and_then(|()| fs::rename(&aside, &path));
    if saved.is_err() {
        let _gone = fs::remove_file(&aside);
    }
    saved?;
    File::open(folder)?.sync_all()?;
    Ok(path)
}

fn write_model(path: &Path, tensors: &[Tensor]) -> io::Result<()> {
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
    // The library leaves a file that only its owner can read; this one is as readable as others.
    let permissions = File::create(path)?.metadata()?.permissions();
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(io::Error::other)?;
    fs::set_permissions(path, permissions)?;
    File::open(path)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_use_is_refused_and_numbers_are_not_given_twice() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b");
        assert_eq!(RunFolder::claim(&folder).unwrap().path(), folder);
        RunFolder::claim(&folder).unwrap();
        fs::write(folder.join("x"), "").unwrap();
        assert!(RunFolder::claim(&folder).unwrap_err().to_string().contains("not empty"));
        let number = || RunFolder::next_free(root.path()).unwrap().path;
        assert!(number().ends_with("0001") && number().ends_with("0002"));
    }

    #[test]
    fn of_two_runs_that_claim_an_empty_folder_one_gets_it() {
        let root = tempfile::tempdir().unwrap();
        let folders = [(); 2].map(|()| RunFolder::claim(root.path()).unwrap());
        folders[0].write_config("first").unwrap();
        let refused = folders[1].write_config("second").unwrap_err();
        assert!(refused.to_string().contains("not empty"), "{refused}");
        assert_eq!(fs::read_to_string(root.path().join(CONFIG)).unwrap(), "first");
    }

    #[test]
    fn what_was_made_for_a_run_is_taken_back_until_a_step_was_taken() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("a")).unwrap();
        for (events, stays) in
            [("{\"event\":\"start\"}\n", false), ("{\"event\":\"step\"}\n", true)]
        {
            let folder = RunFolder::claim(&root.path().join("a/b/c")).unwrap();
            folder.write_config("").unwrap();
            fs::write(folder.path().join(METRICS), events).unwrap();
            folder.remove_unless_trained();
            assert_eq!(root.path().join("a/b").exists(), stays);
            assert!(root.path().join("a").exists());
        }
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
