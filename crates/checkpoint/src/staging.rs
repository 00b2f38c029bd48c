//! Writes a checkpoint aside, until all of it is on the disk.
//!
//! Several processes may write one: each [writes](Staging::write) its pieces; when all have
//! returned from that, one [commits](Staging::commit). How they wait for each other is theirs.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};
use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::manifest::{Manifest, Piece};
use crate::run_folder::{LATEST, PARTIAL};
use crate::{CheckpointError, Checksum, file, header, sealed};

/// The manifest's name in a checkpoint's folder.
pub(crate) const MANIFEST: &str = "manifest.json";
/// What a manifest says that it is.
pub(crate) const MANIFEST_FORMAT: &str = "oxizero checkpoint manifest";
/// More than the manifest of a model that anybody can store.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 1 << 30;
const SHARE_FORMAT: &str = "oxizero checkpoint share";

/// A checkpoint that is being written.
#[derive(Clone, Debug)]
pub struct Staging {
    run: PathBuf,
    name: String,
    nonce: u64,
}

/// A piece that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The tensor's index in [`Manifest::tensors`].
    pub tensor: usize,
    /// The part of the tensor.
    pub part: usize,
    /// Which of the part's elements; none where it is empty.
    pub elements: Range<usize>,
}

/// Gives the elements of pieces: it is told a piece's index in what was planned and which of the
/// part's elements are wanted, and writes them, little-endian, to bytes of at most a block.
pub type Fill<'a> = dyn FnMut(usize, Range<usize>, &mut [u8]) + 'a;

/// What one process wrote, for the one that commits.
#[derive(Serialize, Deserialize)]
struct Share {
    /// With the index of their tensor.
    pieces: Vec<(usize, Piece)>,
    own: Value,
}

impl Staging {
    pub(crate) fn new(run: PathBuf, name: String, nonce: u64) -> Self {
        Self { run, name, nonce }
    }

    /// Where it is written meanwhile.
    pub(crate) fn folder(&self) -> PathBuf {
        self.run.join(format!("{}{PARTIAL}{:x}", self.name, self.nonce))
    }

    /// Where it will be when it is committed.
    pub fn target(&self) -> PathBuf {
        self.run.join(&self.name)
    }

    /// Writes this process's pieces of the tensors of `manifest`, and what it adds of its `own`;
    /// they are on the disk when this returns. `writer` is the process's number, from 0. Memory of
    /// one block is used.
    pub fn write(
        &self,
        writer: usize,
        own: Value,
        manifest: &Manifest,
        pieces: &[Planned],
        fill: &mut Fill<'_>,
    ) -> Result<(), CheckpointError> {
        let mut order: Vec<_> =
            (0..pieces.len()).filter(|index| !pieces[*index].elements.is_empty()).collect();
        // Wide elements first, so that all are aligned.
        order.sort_by_key(|index| {
            std::cmp::Reverse(manifest.tensors[pieces[*index].tensor].dtype.bitsize())
        });
        let name = format!("pieces-{writer:05}.safetensors");
        let mut written = Vec::with_capacity(order.len());
        if !order.is_empty() {
            let (path, mut file) = self.create(&name)?;
            let head = header::encode(HashMap::new(), layout(manifest, pieces, &order), &path)?;
            file.write_all(&head).map_err(CheckpointError::io("write", &path))?;
            let mut blocks = Blocks { file: &file, path: &path, scratch: Vec::new() };
            for index in order {
                let Planned { tensor, part, elements } = pieces[index].clone();
                let size = manifest.tensors[tensor].element_bytes();
                let per_block = manifest.block_bytes / size;
                let fill = |range: Range<usize>, bytes: &mut [u8]| fill(index, range, bytes);
                let checksums = blocks.write(elements.clone(), (size, per_block), fill)?;
                written.push((tensor, Piece { file: name.clone(), part, elements, checksums }));
            }
            file::sync(&file, &path)?;
        }
        let share = Share { pieces: written, own };
        self.put(&share_name(writer), SHARE_FORMAT, &share)?;
        file::sync_folder(&self.folder())
    }

    /// Completes the checkpoint of `writers` processes, all of which have written: adds their
    /// pieces to `manifest`, gives the folder its name, and makes it the latest. A checkpoint of
    /// the same name is replaced in one step.
    ///
    /// Returns its folder. Whatever happens before the last step, the latest checkpoint is the one
    /// that it was; with [`CheckpointError::Written`] the new one is there beside it.
    pub fn commit(
        &self,
        mut manifest: Manifest,
        writers: usize,
    ) -> Result<PathBuf, CheckpointError> {
        let folder = self.folder();
        for writer in 0..writers {
            let path = folder.join(share_name(writer));
            let text = file::read(&path, MANIFEST_BYTES_MAX).map_err(|error| {
                let shared = "all processes must write to one folder that all of them see";
                CheckpointError::file(&path, format!("is not here ({error}); {shared}"))
            })?;
            let share: Share = sealed::unseal(SHARE_FORMAT, &text)
                .map_err(|problem| CheckpointError::file(&path, problem))?;
            for (tensor, piece) in share.pieces {
                let unknown = || CheckpointError::file(&path, "names a tensor that there is not");
                manifest.tensors.get_mut(tensor).ok_or_else(unknown)?.pieces.push(piece);
            }
            manifest.ranks.push(share.own);
            fs::remove_file(&path).map_err(CheckpointError::io("remove", &path))?;
        }
        for tensor in &mut manifest.tensors {
            tensor.pieces.sort_by_key(|piece| (piece.part, piece.elements.start));
        }
        manifest.check()?;
        self.put(MANIFEST, MANIFEST_FORMAT, &manifest)?;
        file::sync_folder(&folder)?;
        let target = self.target();
        self.rename(&folder, &target)?;
        self.point_latest().map_err(|error| error.after(&target))?;
        Ok(target)
    }

    /// Removes what was written; for after an error, which this one does not hide.
    pub fn discard(&self) {
        let _ = fs::remove_dir_all(self.folder());
    }

    fn rename(&self, folder: &Path, target: &Path) -> Result<(), CheckpointError> {
        if target.symlink_metadata().is_ok() {
            check_replaceable(target)?;
            let flags = RenameFlags::EXCHANGE;
            rustix::fs::renameat_with(CWD, folder, CWD, target, flags).map_err(|error| {
                let why = format!(
                    "{}; the file system does not replace a checkpoint in one step: choose \
                     another name, or delete it",
                    std::io::Error::from(error)
                );
                CheckpointError::Io { what: "replace", path: target.display().to_string(), why }
            })?;
            file::sync_folder(&self.run)?;
            // What is left of the replaced one, the next save removes.
            let _ = fs::remove_dir_all(folder);
            return Ok(());
        }
        fs::rename(folder, target).map_err(CheckpointError::io("rename", folder))?;
        file::sync_folder(&self.run)
    }

    fn point_latest(&self) -> Result<(), CheckpointError> {
        let aside = self.run.join(format!("{LATEST}{PARTIAL}{:x}", self.nonce));
        let text = format!("{}\n", self.name);
        create_synced(&aside, text.as_bytes())?;
        let latest = self.run.join(LATEST);
        fs::rename(&aside, &latest).map_err(CheckpointError::io("rename", &aside))?;
        file::sync_folder(&self.run)
    }

    fn create(&self, name: &str) -> Result<(PathBuf, File), CheckpointError> {
        let path = self.folder().join(name);
        let file = create(&path)?;
        Ok((path, file))
    }

    /// Writes a sealed file.
    fn put<T: Serialize>(
        &self,
        name: &str,
        format: &str,
        content: &T,
    ) -> Result<(), CheckpointError> {
        let path = self.folder().join(name);
        let text = sealed::seal(format, content)
            .map_err(|error| CheckpointError::file(&path, format!("cannot be written: {error}")))?;
        create_synced(&path, &text)
    }
}

fn share_name(writer: usize) -> String {
    format!("share-{writer:05}.json")
}

pub(crate) fn create(path: &Path) -> Result<File, CheckpointError> {
    let created = OpenOptions::new().write(true).create_new(true).open(path);
    created.map_err(CheckpointError::io("create", path))
}

pub(crate) fn create_synced(path: &Path, text: &[u8]) -> Result<(), CheckpointError> {
    let mut file = create(path)?;
    file.write_all(text).map_err(CheckpointError::io("write", path))?;
    file::sync(&file, path)
}

/// Refuses to replace what is no checkpoint.
pub(crate) fn check_replaceable(target: &Path) -> Result<(), CheckpointError> {
    match target.symlink_metadata() {
        Ok(_) if !target.join(MANIFEST).is_file() => {
            Err(CheckpointError::file(target, "is there already, and is no checkpoint"))
        }
        _ => Ok(()),
    }
}

/// Where the pieces lie in their file, in this order.
fn layout(manifest: &Manifest, pieces: &[Planned], order: &[usize]) -> Vec<(String, TensorInfo)> {
    let mut end = 0;
    let info = |index: &usize| {
        let Planned { tensor, part, elements } = &pieces[*index];
        let tensor = &manifest.tensors[*tensor];
        let start = end;
        end += elements.len() * tensor.element_bytes();
        let is_whole = elements.len() == tensor.numel().0;
        let shape = if is_whole { tensor.shape.clone() } else { vec![elements.len()] };
        let info = TensorInfo { dtype: tensor.dtype, shape, data_offsets: (start, end) };
        (tensor.piece_name(*part, elements), info)
    };
    order.iter().map(info).collect()
}

/// Writes elements block after block.
struct Blocks<'a> {
    file: &'a File,
    path: &'a Path,
    /// Of words, so that elements of every dtype are aligned.
    scratch: Vec<u64>,
}

impl Blocks<'_> {
    /// Returns the blocks' checksums.
    fn write(
        &mut self,
        elements: Range<usize>,
        (size, per_block): (usize, usize),
        mut fill: impl FnMut(Range<usize>, &mut [u8]),
    ) -> Result<Vec<Checksum>, CheckpointError> {
        let most = elements.len().min(per_block) * size;
        let words = most.div_ceil(8).max(self.scratch.len());
        self.scratch.resize(words, 0);
        let scratch: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch);
        let mut block = |start: usize| {
            let range = start..elements.end.min(start + per_block);
            let bytes = &mut scratch[..range.len() * size];
            fill(range, bytes);
            let mut file = self.file;
            file.write_all(bytes).map_err(CheckpointError::io("write", self.path))?;
            Ok(Checksum::of(bytes))
        };
        elements.clone().step_by(per_block).map(&mut block).collect()
    }
}
