//! The header of a safetensors file: eight bytes of its length, then JSON, then the elements.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};

use crate::CheckpointError;

/// Longer than the header of any file here; the format's own limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;

/// Where the tensors of a file are.
#[derive(Debug)]
pub(crate) struct Header {
    metadata: Metadata,
    /// Bytes before the first element.
    start: u64,
}

impl Header {
    /// Reads and checks that of a file: tensors lie one after the other, the last one's end is the
    /// file's.
    pub(crate) fn read(file: &File, path: &Path) -> Result<Self, CheckpointError> {
        let refuse = |problem: String| CheckpointError::file(path, problem);
        let io = || CheckpointError::io("read", path);
        let file_bytes = file.metadata().map_err(io())?.len();
        let mut length = [0; LENGTH_BYTES as usize];
        if file_bytes < LENGTH_BYTES {
            return Err(refuse(format!("has {file_bytes} bytes, and no header")));
        }
        file.read_exact_at(&mut length, 0).map_err(io())?;
        let length = u64::from_le_bytes(length);
        if length > HEADER_BYTES_MAX.min(file_bytes - LENGTH_BYTES) {
            return Err(refuse(format!(
                "says that its header has {length} bytes; the file has {file_bytes}, and a header \
                 at most {HEADER_BYTES_MAX}"
            )));
        }
        let mut text = vec![0; length as usize];
        file.read_exact_at(&mut text, LENGTH_BYTES).map_err(io())?;
        let metadata: Metadata = serde_json::from_slice(&text)
            .map_err(|error| refuse(format!("has no safetensors header: {error}")))?;
        let start = LENGTH_BYTES + length;
        let expected = start.checked_add(metadata.data_len() as u64);
        if expected != Some(file_bytes) {
            let tensors = metadata.data_len();
            return Err(refuse(format!(
                "has {file_bytes} bytes, not those of its header and {tensors} of tensors"
            )));
        }
        Ok(Self { metadata, start })
    }

    /// The names of the tensors.
    pub(crate) fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    /// The tensor with this name, and the file's byte that it starts at.
    pub(crate) fn tensor(&self, name: &str) -> Option<(&TensorInfo, u64)> {
        let info = self.metadata.info(name)?;
        Some((info, self.start + info.data_offsets.0 as u64))
    }
}

/// The bytes before the elements of these tensors, which lie one after the other; `entries` are
/// what the file says beside them.
pub(crate) fn encode(
    entries: HashMap<String, String>,
    tensors: Vec<(String, TensorInfo)>,
    path: &Path,
) -> Result<Vec<u8>, CheckpointError> {
    let refuse = |problem: String| CheckpointError::file(path, problem);
    let entries = Some(entries).filter(|entries| !entries.is_empty());
    let metadata = Metadata::new(entries, tensors)
        .map_err(|error| refuse(format!("cannot hold these tensors: {error}")))?;
    let mut text = serde_json::to_vec(&metadata)
        .map_err(|error| refuse(format!("cannot have this header: {error}")))?;
    text.resize(text.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    if text.len() as u64 > HEADER_BYTES_MAX {
        let length = text.len();
        return Err(refuse(format!("would have a header of {length} bytes; write more files")));
    }
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}
