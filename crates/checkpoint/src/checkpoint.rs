//! Reads a checkpoint: elements of tensors, from whatever pieces they are in.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use oxizero_core::{Numel, Part};

use crate::header::Header;
use crate::manifest::{Manifest, Piece, Role, Tensor};
use crate::staging::{MANIFEST, MANIFEST_BYTES_MAX, MANIFEST_FORMAT};
use crate::{CheckpointError, Checksum, file, sealed};

/// Files that are open at one time; a process may have few, and a checkpoint many.
const OPEN_MAX: usize = 64;

/// A checkpoint that is read. Every byte that it gives was compared with its checksum.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    by_name: HashMap<(Role, String), usize>,
    files: Files,
    block: Block,
}

/// The block that was read last, for whoever takes it in small runs.
#[derive(Debug, Default)]
struct Block {
    /// The tensor, the piece and the block that it is.
    at: Option<(usize, usize, usize)>,
    /// Of words, so that elements of every dtype are aligned.
    words: Vec<u64>,
}

impl Checkpoint {
    /// Reads and checks the manifest of the checkpoint in `folder`.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(MANIFEST);
        if !path.is_file() {
            return Err(CheckpointError::NoCheckpoint {
                folder: folder.display().to_string(),
                why: format!("it has no `{MANIFEST}`"),
            });
        }
        let text = file::read(&path, MANIFEST_BYTES_MAX)?;
        let manifest: Manifest = sealed::unseal(MANIFEST_FORMAT, &text)
            .map_err(|problem| CheckpointError::file(&path, problem))?;
        manifest.check()?;
        let named =
            |(index, tensor): (usize, &Tensor)| ((tensor.role.clone(), tensor.name.clone()), index);
        let by_name = manifest.tensors.iter().enumerate().map(named).collect();
        let files = Files { folder: folder.to_owned(), known: BTreeMap::new(), open: 0 };
        let (folder, block) = (folder.to_owned(), Block::default());
        Ok(Self { folder, manifest, by_name, files, block })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What is in it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The index of a tensor in [`Manifest::tensors`].
    pub fn find(&self, role: &Role, name: &str) -> Option<usize> {
        self.by_name.get(&(role.clone(), name.to_owned())).copied()
    }

    /// The index of a parameter's weights: its master weights where there are some.
    pub fn weights_of(&self, name: &str) -> Option<usize> {
        self.find(&Role::Master, name).or_else(|| self.find(&Role::Weights, name))
    }

    /// Opens every file that holds something of these tensors, and compares what its header says
    /// of them with the manifest; no element is read.
    pub fn check_files(
        &mut self,
        tensors: impl IntoIterator<Item = usize>,
    ) -> Result<(), CheckpointError> {
        for tensor in tensors.into_iter().map(|index| &self.manifest.tensors[index]) {
            for piece in &tensor.pieces {
                self.files.find(tensor, piece)?;
            }
        }
        Ok(())
    }

    /// Reads `elements` of `part` of a tensor, in any order: `sink` is given which of the part's
    /// elements come, the first of them, and their little-endian bytes, which are aligned for the
    /// dtype. The part need not be one of those that the tensor is stored in.
    ///
    /// # Errors
    ///
    /// [`Asked`](CheckpointError::Asked) if the part is one of another shape of tensor; else, if a
    /// file is not what was written. What the sink was given before is right.
    pub fn read(
        &mut self,
        tensor: usize,
        (part, elements): (&Part, Range<usize>),
        sink: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), CheckpointError> {
        let stored = &self.manifest.tensors[tensor];
        let size = stored.element_bytes();
        if part.whole != stored.shape || elements.end > part.numel().0 {
            let (there, asked) = (&stored.shape, &part.whole);
            let problem =
                format!("it has the shape {there:?} in the checkpoint, and {asked:?} here");
            return Err(CheckpointError::Asked { tensor: stored.to_string(), problem });
        }
        for (index, piece) in stored.pieces.iter().enumerate() {
            let of_piece = stored.part(piece.part).expect("check() refuses other parts");
            for run in of_piece.common(part) {
                let shift = |at: usize| run.in_first + at - run.in_second;
                let wanted =
                    elements.start.max(run.in_second)..elements.end.min(run.in_second + run.numel);
                if wanted.is_empty() {
                    continue;
                }
                let in_piece = piece.elements.start.max(shift(wanted.start))
                    ..piece.elements.end.min(shift(wanted.end));
                if in_piece.is_empty() {
                    continue;
                }
                let place = Place { tensor, piece: index, block_bytes: self.manifest.block_bytes };
                let (mut at, files) =
                    (run.in_second + in_piece.start - run.in_first, &mut self.files);
                let mut give = |bytes: &[u8]| {
                    sink(at, bytes);
                    at += bytes.len() / size;
                };
                self.block.read(files, (stored, piece), (place, in_piece), &mut give)?;
            }
        }
        Ok(())
    }

    /// A whole tensor, in one run of bytes.
    pub fn read_whole(&mut self, tensor: usize) -> Result<Vec<u8>, CheckpointError> {
        self.check_files([tensor])?; // before memory of the size that it is to have is taken
        let stored = &self.manifest.tensors[tensor];
        let (Numel(numel), size) = (stored.numel(), stored.element_bytes());
        let (part, mut bytes) = (Part::all(&stored.shape), vec![0; numel * size]);
        self.read(tensor, (&part, 0..numel), &mut |at, piece| {
            bytes[at * size..at * size + piece.len()].copy_from_slice(piece);
        })?;
        Ok(bytes)
    }

    /// Reads all of a tensor, and compares it with its checksums.
    pub fn verify(&mut self, tensor: usize) -> Result<(), CheckpointError> {
        let part = Part::all(&self.manifest.tensors[tensor].shape);
        let numel = part.numel().0;
        self.read(tensor, (&part, 0..numel), &mut |_, _| ())
    }
}

/// Which piece a block is of.
#[derive(Clone, Copy)]
struct Place {
    tensor: usize,
    piece: usize,
    block_bytes: usize,
}

impl Block {
    /// Gives the bytes of `elements` of a piece, block after block.
    fn read(
        &mut self,
        files: &mut Files,
        (tensor, piece): (&Tensor, &Piece),
        (place, elements): (Place, Range<usize>),
        give: &mut dyn FnMut(&[u8]),
    ) -> Result<(), CheckpointError> {
        let size = tensor.element_bytes();
        let in_piece = |element: usize| (element - piece.elements.start) * size;
        let (mut at, end) = (in_piece(elements.start), in_piece(elements.end));
        while at < end {
            let index = at / place.block_bytes;
            let start = index * place.block_bytes;
            let bytes = self.load(files, (tensor, piece), (place, index))?;
            let to = end.min(start + place.block_bytes);
            give(&bytes[at - start..to - start]);
            at = to;
        }
        Ok(())
    }

    fn load(
        &mut self,
        files: &mut Files,
        (tensor, piece): (&Tensor, &Piece),
        (place, index): (Place, usize),
    ) -> Result<&[u8], CheckpointError> {
        let start = index * place.block_bytes;
        let piece_bytes = piece.elements.len() * tensor.element_bytes();
        let len = place.block_bytes.min(piece_bytes - start);
        let at = Some((place.tensor, place.piece, index));
        if self.at != at {
            self.at = None;
            let (file, offset, path) = files.find(tensor, piece)?;
            self.words.resize(self.words.len().max(len.div_ceil(8)), 0);
            let bytes = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut self.words)[..len];
            file.read_exact_at(bytes, offset + start as u64)
                .map_err(CheckpointError::io("read", &path))?;
            if Checksum::of(bytes) != piece.checksums[index] {
                let first = piece.elements.start + start / tensor.element_bytes();
                let last = first + len / tensor.element_bytes();
                return Err(CheckpointError::Tensor {
                    tensor: tensor.to_string(),
                    file: path.display().to_string(),
                    problem: format!(
                        "is not what was written: the checksum of elements {first}..{last} is \
                         another"
                    ),
                });
            }
            self.at = at;
        }
        Ok(&bytemuck::cast_slice(&self.words)[..len])
    }
}

/// The files of a checkpoint, opened as they are asked for.
#[derive(Debug)]
struct Files {
    folder: PathBuf,
    known: BTreeMap<String, Known>,
    /// How many are open.
    open: usize,
}

#[derive(Debug)]
struct Known {
    header: Header,
    file: Option<File>,
}

impl Files {
    /// The file with a piece, the byte that it starts at, and the file's path.
    fn find(
        &mut self,
        tensor: &Tensor,
        piece: &Piece,
    ) -> Result<(&File, u64, PathBuf), CheckpointError> {
        let path = self.folder.join(&piece.file);
        let wrong = |problem: String| CheckpointError::Tensor {
            tensor: tensor.to_string(),
            file: path.display().to_string(),
            problem,
        };
        let known = self.known.get(&piece.file);
        if known.is_none_or(|known| known.file.is_none()) {
            if self.open == OPEN_MAX {
                self.known.values_mut().for_each(|known| known.file = None);
                self.open = 0;
            }
            let file = file::open(&path).map_err(|error| wrong(format!("is missing: {error}")))?;
            let header = Header::read(&file, &path)?;
            self.known.insert(piece.file.clone(), Known { header, file: Some(file) });
            self.open += 1;
        }
        let Known { header, file } = &self.known[&piece.file];
        let name = tensor.piece_name(piece.part, &piece.elements);
        let Some((info, offset)) = header.tensor(&name) else {
            return Err(wrong(format!("is missing: the file has no `{name}`")));
        };
        let numel = info.data_offsets.1 - info.data_offsets.0;
        let expected = piece.elements.len() * tensor.element_bytes();
        if info.dtype != tensor.dtype || numel != expected {
            let (dtype, shape) = (info.dtype, &info.shape);
            return Err(wrong(format!(
                "is {shape:?} elements of {dtype} as `{name}`, not {} of {}",
                piece.elements.len(),
                tensor.dtype
            )));
        }
        let file = file.as_ref().expect("it was opened above");
        Ok((file, offset, path))
    }
}
