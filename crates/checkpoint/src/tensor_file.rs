//! One safetensors file of whole tensors that are in memory.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorInfo;

use crate::staging::create;
use crate::{CheckpointError, file, header};

/// A tensor in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorBytes<'a> {
    /// Its name, unique in the file.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: &'a [usize],
    /// The elements, row-major and little-endian.
    pub bytes: &'a [u8],
}

/// Writes tensors to the safetensors file `path`, whose folder is made where there is none. A file
/// that is there already is replaced in one step; until then it is what it was. When this returns,
/// the bytes are on the disk. `entries` are texts that the file says beside the tensors.
///
/// # Errors
///
/// If the bytes of a tensor are not its shape's, if two share a name, or if the system refuses;
/// what was written is removed then.
pub fn write_tensors(
    path: &Path,
    tensors: &[TensorBytes<'_>],
    entries: &HashMap<String, String>,
) -> Result<(), CheckpointError> {
    let (folder, aside) = file::aside(path)?;
    fs::create_dir_all(folder).map_err(CheckpointError::io("create", folder))?;
    let written = write(&aside, path, tensors, entries);
    let named = written
        .and_then(|()| fs::rename(&aside, path).map_err(CheckpointError::io("rename", &aside)));
    if named.is_err() {
        let _gone = fs::remove_file(&aside);
    }
    named.and_then(|()| file::sync_folder(folder))
}

fn write(
    aside: &Path,
    path: &Path,
    tensors: &[TensorBytes<'_>],
    entries: &HashMap<String, String>,
) -> Result<(), CheckpointError> {
    let mut tensors: Vec<_> = tensors.iter().collect();
    // Wide elements first, so that all are aligned.
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.bitsize()));
    let mut end = 0;
    let info = |tensor: &&TensorBytes<'_>| {
        let start = end;
        end += tensor.bytes.len();
        let (dtype, shape) = (tensor.dtype, tensor.shape.to_vec());
        (tensor.name.to_owned(), TensorInfo { dtype, shape, data_offsets: (start, end) })
    };
    let infos: Vec<_> = tensors.iter().map(info).collect();
    // Refuses bytes that are not the shape's, too.
    let head = header::encode(entries.clone(), infos, path)?;
    // Of a process of this number that was killed.
    let _none = fs::remove_file(aside);
    let mut file = create(aside)?;
    file.write_all(&head).map_err(CheckpointError::io("write", aside))?;
    for tensor in tensors {
        file.write_all(tensor.bytes).map_err(CheckpointError::io("write", aside))?;
    }
    file::sync(&file, aside)
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    fn tensor<'a>(
        name: &'a str,
        dtype: Dtype,
        shape: &'a [usize],
        bytes: &'a [u8],
    ) -> TensorBytes<'a> {
        TensorBytes { name, dtype, shape, bytes }
    }

    #[test]
    fn a_file_is_what_the_format_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/model.safetensors");
        let tensors = [
            tensor("narrow", Dtype::U8, &[3], b"abc"),
            tensor("wide", Dtype::F32, &[2, 1], &[1, 2, 3, 4, 5, 6, 7, 8]),
            tensor("empty", Dtype::F32, &[0], b""),
        ];
        let entries = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        for _ in 0..2 {
            write_tensors(&path, &tensors, &entries).unwrap();
        }
        let bytes = fs::read(&path).unwrap();
        let read = SafeTensors::deserialize(&bytes).unwrap();
        for one in tensors {
            let found = read.tensor(one.name).unwrap();
            assert_eq!((found.dtype(), found.shape()), (one.dtype, one.shape));
            assert_eq!(found.data(), one.bytes);
        }
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(metadata.metadata(), &Some(entries));
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_is_refused_leaves_the_file_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, "before").unwrap();
        let short = [tensor("a", Dtype::F32, &[2], b"1234")];
        write_tensors(&path, &short, &HashMap::new()).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"before");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
