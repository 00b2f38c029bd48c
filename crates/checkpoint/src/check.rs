//! Whether a manifest describes a checkpoint. It may come from anybody: no number in it is believed
//! before it is compared with another, and none is allocated by.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use oxizero_core::Part;

use crate::manifest::{Manifest, Param, Piece, Role, Tensor};
use crate::{CheckpointError, file};

/// Bytes with one checksum in what is written: as little as is read for one element, and still few
/// checksums (a 7 B model's states have a manifest of 2 MB).
pub const BLOCK_BYTES: usize = 1 << 20;
/// Blocks of others' checkpoints: whole elements of every dtype, and not more memory than anybody
/// misses.
const BLOCK_BYTES_RANGE: Range<usize> = 16..(16 << 20) + 1;
/// More dimensions than any tensor's.
const DIMS_MAX: usize = 32;
/// Longer than any parameter's name.
const NAME_BYTES_MAX: usize = 4096;

type Checked = Result<(), CheckpointError>;

impl Manifest {
    /// Refuses a manifest whose tensors' pieces do not tile them, or that is not sorted as
    /// [`Tensor::pieces`] says; the error names the tensor.
    pub fn check(&self) -> Checked {
        let block = self.block_bytes;
        if !BLOCK_BYTES_RANGE.contains(&block) || !block.is_power_of_two() {
            let problem = format!("{block} is not a power of two from 16 to {}", 16 << 20);
            return Err(CheckpointError::manifest("block_bytes", problem));
        }
        self.check_params()?;
        let mut seen = HashSet::new();
        for tensor in &self.tensors {
            let refuse =
                |problem: &str| Err(CheckpointError::manifest(tensor.to_string(), problem));
            if !seen.insert((&tensor.role, tensor.name.as_str())) {
                return refuse("it occurs twice");
            }
            check_name(tensor)?;
            check_tensor(tensor, block)?;
        }
        self.check_roles(&seen)
    }

    fn check_params(&self) -> Checked {
        let mut names = HashSet::new();
        for param in &self.params {
            let all = std::iter::once(&param.name).chain(&param.aliases);
            if let Some(name) = all.into_iter().find(|name| !names.insert(name.as_str())) {
                let problem = format!("the name `{name}` occurs twice");
                return Err(CheckpointError::manifest(format!("`{}`", param.name), problem));
            }
        }
        Ok(())
    }

    /// Every parameter has weights of one kind, and what is of a parameter is of one that there is.
    fn check_roles(&self, seen: &HashSet<(&Role, &str)>) -> Checked {
        self.check_updates()?;
        let has = |param: &Param, role| usize::from(seen.contains(&(&role, param.name.as_str())));
        let wrong = self
            .params
            .iter()
            .find(|param| has(param, Role::Weights) + has(param, Role::Master) != 1);
        if let Some(param) = wrong {
            let problem = "it has not one of weights and master weights";
            return Err(CheckpointError::manifest(format!("`{}`", param.name), problem));
        }
        let params: HashSet<_> = self.params.iter().map(|param| param.name.as_str()).collect();
        let of_param = |tensor: &&Tensor| tensor.role != Role::Buffer;
        let mut tensors = self.tensors.iter().filter(of_param);
        match tensors.find(|tensor| !params.contains(tensor.name.as_str())) {
            Some(tensor) => {
                let problem = "there is no such parameter";
                Err(CheckpointError::manifest(tensor.to_string(), problem))
            }
            None => Ok(()),
        }
    }
}

impl Manifest {
    /// Every parameter's updates are one number, or one for each part.
    fn check_updates(&self) -> Checked {
        let is_weights = |tensor: &&Tensor| matches!(tensor.role, Role::Master | Role::Weights);
        let counts: HashMap<_, _> = self
            .tensors
            .iter()
            .filter(is_weights)
            .map(|tensor| (tensor.name.as_str(), tensor.part(0).and_then(|part| part.count())))
            .collect();
        let is_wrong = |param: &&Param| {
            let count = counts.get(param.name.as_str()).copied().flatten();
            param.updates.len() != 1 && Some(param.updates.len()) != count
        };
        match self.params.iter().find(is_wrong) {
            Some(param) => {
                let problem = format!("it has {} numbers of updates", param.updates.len());
                Err(CheckpointError::manifest(format!("`{}`", param.name), problem))
            }
            None => Ok(()),
        }
    }
}

fn check_name(tensor: &Tensor) -> Checked {
    let state = if let Role::State(name) = &tensor.role { name.as_str() } else { "" };
    if tensor.name.len() > NAME_BYTES_MAX || state.len() > NAME_BYTES_MAX {
        let problem = format!("its name is longer than {NAME_BYTES_MAX} bytes");
        return Err(CheckpointError::manifest("a tensor", problem));
    }
    Ok(())
}

fn check_tensor(tensor: &Tensor, block_bytes: usize) -> Checked {
    let refuse = |problem: String| Err(CheckpointError::manifest(tensor.to_string(), problem));
    let Tensor { shape, part_shape, dtype, pieces, .. } = tensor;
    if shape.len() > DIMS_MAX || part_shape.len() != shape.len() {
        return refuse(format!("parts of {part_shape:?} are none of a tensor of {shape:?}"));
    }
    if !dtype.bitsize().is_multiple_of(8) {
        return refuse(format!("elements of {dtype} are no whole bytes"));
    }
    // Sizes of 0 are left out, for strides are counted of empty tensors too.
    let bytes = |shape: &[usize]| {
        let sizes = shape.iter().map(|size| *size.max(&1)).chain([tensor.element_bytes()]);
        sizes.into_iter().try_fold(1_usize, usize::checked_mul)
    };
    let most = isize::MAX as usize;
    if [shape, part_shape].iter().any(|shape| bytes(shape).is_none_or(|bytes| bytes > most)) {
        return refuse(format!("its shape {shape:?} is larger than memory can be"));
    }
    let Some(part) = Part::of_equal(shape, part_shape, 0) else {
        return refuse(format!("parts of {part_shape:?} do not fill a tensor of {shape:?}"));
    };
    let (numel, count) = (part.numel().0, part.count().unwrap_or(usize::MAX));
    let mut next = (0, 0);
    for piece in pieces {
        check_piece(tensor, piece, block_bytes)?;
        if (piece.part, piece.elements.start) != next || piece.elements.end > numel {
            let Range { start, end } = piece.elements;
            return refuse(format!(
                "elements {start}..{end} of part {} in `{}` do not follow on element {} of part {}",
                piece.part, piece.file, next.1, next.0
            ));
        }
        next.1 = piece.elements.end;
        if next.1 == numel {
            next = (next.0 + 1, 0);
        }
    }
    match numel == 0 || next == (count, 0) {
        true => Ok(()),
        false => refuse(format!("no piece has element {} of part {}", next.1, next.0)),
    }
}

fn check_piece(tensor: &Tensor, piece: &Piece, block_bytes: usize) -> Checked {
    let refuse = |problem: String| Err(CheckpointError::manifest(tensor.to_string(), problem));
    file::check_name("file of a checkpoint", &piece.file)?;
    let Range { start, end } = piece.elements;
    if start >= end {
        return refuse(format!("`{}` is to hold elements {start}..{end}", piece.file));
    }
    let bytes = (end - start).checked_mul(tensor.element_bytes());
    match bytes.map(|bytes| bytes.div_ceil(block_bytes)) {
        Some(blocks) if blocks == piece.checksums.len() => Ok(()),
        _ => refuse(format!(
            "elements {start}..{end} in `{}` have {} checksums, not one for each block",
            piece.file,
            piece.checksums.len()
        )),
    }
}
