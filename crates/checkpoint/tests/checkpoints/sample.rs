//! A small checkpoint with everything in it.

use std::path::{Path, PathBuf};

use oxizero_checkpoint::{
    Checkpoint, CheckpointError, Checksum, Dtype, Group, Manifest, Param, Planned, Role, RunFolder,
    Tensor, Training, Value,
};
use oxizero_core::{LossScalerState, Part};
use tempfile::TempDir;

/// Processes that write it.
pub(crate) const WRITERS: usize = 3;
const BLOCK_BYTES: usize = 16;

/// What the checkpoint of a step has, before it is written.
pub(crate) fn manifest(step: u64) -> Manifest {
    let param = |name: &str, trainable, updates: &[u64]| Param {
        name: name.into(),
        aliases: if name == "a" { vec!["tied".into()] } else { vec![] },
        dtype: Dtype::BF16,
        trainable,
        updates: updates.to_vec(),
    };
    let tensor = |name: &str, role, shape: &[usize], part: &[usize], dtype| Tensor {
        name: name.into(),
        role,
        shape: shape.to_vec(),
        part_shape: part.to_vec(),
        dtype,
        pieces: vec![],
    };
    let moment = || Role::State("exp_avg".into());
    Manifest {
        block_bytes: BLOCK_BYTES,
        params: vec![
            param("a", true, &[step]),
            param("b/0-3", true, &[1, 2, 3, step]),
            param("frozen", false, &[0]),
            param("", false, &[0]),
        ],
        tensors: vec![
            tensor("a", Role::Master, &[7], &[7], Dtype::F32),
            tensor("a", moment(), &[7], &[7], Dtype::F32),
            tensor("b/0-3", Role::Master, &[4, 6], &[2, 3], Dtype::F32),
            tensor("b/0-3", moment(), &[4, 6], &[2, 3], Dtype::F32),
            tensor("frozen", Role::Weights, &[3, 11], &[3, 11], Dtype::BF16),
            tensor("", Role::Weights, &[0, 8], &[0, 8], Dtype::F16),
            tensor("positions", Role::Buffer, &[], &[], Dtype::I64),
        ],
        training: Training {
            applied_steps: step,
            loss_scaler: Some(LossScalerState {
                scale: 65536.0,
                steps_since_overflow: 3,
                overflows_left: 1,
            }),
            rule: "AdamW".into(),
            schedule: String::new(),
            groups: vec![Group { lr: 0.1, weight_decay: 1.0 / 3.0, rule: None }],
        },
        caller: Value::from("données"),
        ranks: vec![],
    }
}

/// The pieces of one of the writers: of every part, its third of the elements.
pub(crate) fn pieces(manifest: &Manifest, writer: usize) -> Vec<Planned> {
    let of = |(index, tensor): (usize, &Tensor)| {
        let part = tensor.part(0).unwrap();
        let (numel, count) = (part.numel().0, part.count().unwrap());
        let elements = numel * writer / WRITERS..numel * (writer + 1) / WRITERS;
        let planned = move |part| Planned { tensor: index, part, elements: elements.clone() };
        (0..count).map(planned).collect::<Vec<_>>()
    };
    manifest.tensors.iter().enumerate().flat_map(of).collect()
}

/// The bytes of an element of the whole tensor, which no other has.
pub(crate) fn element(tensor: usize, index: usize, size: usize, step: u64) -> Vec<u8> {
    let value = 1 + tensor as u64 * 1000 + index as u64 + step * 7919;
    value.to_le_bytes()[..size].to_vec()
}

/// All bytes of a tensor.
pub(crate) fn whole(manifest: &Manifest, tensor: usize) -> Vec<u8> {
    let (of, step) = (&manifest.tensors[tensor], manifest.training.applied_steps);
    let element = |index| element(tensor, index, of.element_bytes(), step);
    (0..of.numel().0).flat_map(element).collect()
}

/// Writes the checkpoint of a step.
pub(crate) fn save(run: &RunFolder, name: &str, step: u64) -> Result<PathBuf, CheckpointError> {
    let manifest = manifest(step);
    let staging = run.begin(name, step)?;
    for writer in (0..WRITERS).rev() {
        let staging = run.join(name, step)?;
        let planned = pieces(&manifest, writer);
        staging.write(
            writer,
            Value::from(writer),
            &manifest,
            &planned,
            &mut |index, range, bytes| {
                let Planned { tensor, part, .. } = planned[index];
                let of = &manifest.tensors[tensor];
                let all = Part::all(&of.shape);
                for run in of.part(part).unwrap().common(&all) {
                    for at in 0..run.numel {
                        let (in_part, index) = (run.in_first + at, run.in_second + at);
                        if range.contains(&in_part) {
                            let (size, at) = (of.element_bytes(), in_part - range.start);
                            let value = element(tensor, index, size, step);
                            bytes[at * size..(at + 1) * size].copy_from_slice(&value);
                        }
                    }
                }
            },
        )?;
    }
    staging.commit(manifest, WRITERS)
}

/// A run with the checkpoint of step 5, and that one's folder.
pub(crate) fn saved() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let saved = save(&RunFolder::new(folder.path()), "step-000005", 5).unwrap();
    (folder, saved)
}

/// A manifest of this content.
pub(crate) fn sealed_text(content: &Value) -> String {
    let content = content.to_string();
    let checksum = Checksum::of(content.as_bytes());
    let format = "oxizero checkpoint manifest";
    format!(
        "{{\"format\":\"{format}\",\"version\":1,\"checksum\":\"{checksum}\",\
         \"content\":{content}}}"
    )
}

/// Reads all of a checkpoint.
pub(crate) fn read(folder: &Path) -> Result<(Manifest, Vec<Vec<u8>>), CheckpointError> {
    let mut checkpoint = Checkpoint::open(folder)?;
    let tensors = 0..checkpoint.manifest().tensors.len();
    let values: Result<Vec<_>, _> = tensors.map(|index| checkpoint.read_whole(index)).collect();
    Ok((checkpoint.manifest().clone(), values?))
}
