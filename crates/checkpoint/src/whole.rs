//! Checkpoints that one process writes of whole tensors, as of what comes from other formats.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::{CheckpointError, Manifest, Planned, RunFolder, Staging, Tensor};

/// Gives the elements of a tensor of the manifest, row-major and little-endian.
pub type Give<'a, E> = dyn FnMut(usize) -> Result<Vec<u8>, E> + 'a;

/// Writes the checkpoint `name`, and makes it the latest. `manifest` has no pieces and no ranks;
/// each of its tensors is in one part, and `give` is asked for them one by one, so that one is in
/// memory at a time. Returns the checkpoint's folder.
///
/// # Errors
///
/// Those of `give`; and if what it gives has not the tensor's size, if the manifest describes no
/// checkpoint, or if the system refuses. Nothing is left then, unless the error is
/// [`CheckpointError::Written`].
pub fn write_whole<E: From<CheckpointError>>(
    run: &RunFolder,
    name: &str,
    manifest: Manifest,
    give: &mut Give<'_, E>,
) -> Result<PathBuf, E> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let nonce = (since.as_nanos() as u64).rotate_left(20) ^ u64::from(std::process::id());
    let staging = run.begin(name, nonce)?;
    let written = write_tensors(&staging, &manifest, give)
        .and_then(|()| staging.commit(manifest, 1).map_err(E::from));
    written.inspect_err(|_| staging.discard())
}

fn write_tensors<E: From<CheckpointError>>(
    staging: &Staging,
    manifest: &Manifest,
    give: &mut Give<'_, E>,
) -> Result<(), E> {
    let planned = |(tensor, stored): (usize, &Tensor)| Planned {
        tensor,
        part: 0,
        elements: 0..stored.numel().0,
    };
    let planned: Vec<_> = manifest.tensors.iter().enumerate().map(planned).collect();
    let (mut held, mut failure) = ((usize::MAX, Vec::new()), None);
    let fill = &mut |index: usize, range: Range<usize>, bytes: &mut [u8]| {
        let stored = &manifest.tensors[index];
        if held.0 != index && failure.is_none() {
            let given = give(index).and_then(|given| Ok(sized(stored, given)?));
            held = (
                index,
                given.unwrap_or_else(|error| {
                    failure = Some(error);
                    Vec::new()
                }),
            );
        }
        let size = stored.element_bytes();
        match held.1.get(range.start * size..range.end * size) {
            Some(elements) => bytes.copy_from_slice(elements),
            None => bytes.fill(0), // after an error, and never read
        }
    };
    let written = staging.write(0, Value::Null, manifest, &planned, fill);
    failure.map_or(Ok(()), Err)?;
    Ok(written?)
}

/// The bytes, if they are as many as the tensor's.
fn sized(tensor: &Tensor, bytes: Vec<u8>) -> Result<Vec<u8>, CheckpointError> {
    let (given, expected) = (bytes.len(), tensor.numel().0 * tensor.element_bytes());
    if given == expected {
        return Ok(bytes);
    }
    let problem = format!("it was given {given} bytes, and has {expected}");
    Err(CheckpointError::Asked { tensor: tensor.to_string(), problem })
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;
    use crate::{BLOCK_BYTES, Param, Role, Training};

    fn tensor(name: &str, role: Role, dtype: Dtype, shape: &[usize]) -> Tensor {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        Tensor { name, role, part_shape: shape.clone(), shape, dtype, pieces: Vec::new() }
    }

    fn manifest() -> Manifest {
        let param = |name: &str| Param {
            name: name.into(),
            aliases: Vec::new(),
            dtype: Dtype::F32,
            trainable: true,
            updates: vec![3],
        };
        Manifest {
            block_bytes: BLOCK_BYTES,
            params: vec![param("a"), param("b")],
            tensors: vec![
                tensor("shift", Role::Buffer, Dtype::BOOL, &[3]),
                tensor("a", Role::Master, Dtype::F32, &[300, 1000]), // more than a block
                tensor("b", Role::Master, Dtype::F32, &[0]),
            ],
            training: Training::default(),
            caller: Value::Null,
            ranks: Vec::new(),
        }
    }

    fn bytes(tensor: usize) -> Vec<u8> {
        let len = [3, 4 * 300_000, 0][tensor];
        (0..len).map(|byte: usize| (byte % 251) as u8).collect()
    }

    #[test]
    fn what_is_given_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::new(folder.path());
        let mut give = |tensor| Ok::<_, CheckpointError>(bytes(tensor));
        let written = write_whole(&run, "first", manifest(), &mut give).unwrap();
        let mut checkpoint = run.open(None).unwrap();
        assert_eq!(checkpoint.folder(), written);
        for tensor in 0..3 {
            assert_eq!(checkpoint.read_whole(tensor).unwrap(), bytes(tensor));
        }
    }

    #[test]
    fn after_an_error_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::new(folder.path());
        let refuse = || CheckpointError::file("there".as_ref(), "is damaged");
        let mut give = |tensor| if tensor == 1 { Err(refuse()) } else { Ok(bytes(tensor)) };
        let error = write_whole(&run, "first", manifest(), &mut give).unwrap_err();
        assert_eq!(error, refuse());
        let mut short = |_| Ok(vec![0; 3]);
        let error: CheckpointError =
            write_whole(&run, "first", manifest(), &mut short).unwrap_err();
        assert!(error.to_string().contains("the master weights of `a`: it was given 3"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
