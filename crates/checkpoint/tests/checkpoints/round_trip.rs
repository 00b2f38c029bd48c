//! What was written is read, whoever asks for whatever part.

use oxizero_checkpoint::{Checkpoint, CheckpointError, Role};
use oxizero_core::Part;

use crate::sample::{WRITERS, element, manifest, pieces, read, saved, whole};

#[test]
fn every_element_comes_back() {
    let (_run, folder) = saved();
    let (found, values) = read(&folder).unwrap();
    let written = manifest(5);
    assert_eq!((&found.params, &found.training), (&written.params, &written.training));
    assert_eq!((found.caller, found.ranks.len()), (written.caller.clone(), WRITERS));
    assert_eq!(found.ranks[2], 2);
    for (index, values) in values.iter().enumerate() {
        assert_eq!(*values, whole(&written, index), "{}", written.tensors[index]);
    }
}

#[test]
fn only_what_was_planned_is_stored() {
    let (_run, folder) = saved();
    let bytes = |writer: usize| {
        let manifest = manifest(5);
        let size = |planned: &oxizero_checkpoint::Planned| {
            planned.elements.len() * manifest.tensors[planned.tensor].element_bytes()
        };
        pieces(&manifest, writer).iter().map(size).sum::<usize>() as u64
    };
    for writer in 0..WRITERS {
        let path = folder.join(format!("pieces-{writer:05}.safetensors"));
        let text = std::fs::read(&path).unwrap();
        let header = u64::from_le_bytes(text[..8].try_into().unwrap());
        assert_eq!(text.len() as u64, 8 + header + bytes(writer));
        safetensors::SafeTensors::deserialize(&text).unwrap();
    }
    let names = std::fs::read_dir(&folder).unwrap().count();
    assert_eq!(names, WRITERS + 1, "the manifest and one file a writer");
}

#[test]
fn any_elements_of_any_part_are_read_from_whatever_pieces_hold_them() {
    let (_run, folder) = saved();
    let mut checkpoint = Checkpoint::open(&folder).unwrap();
    let tensor = checkpoint.find(&Role::Master, "b/0-3").unwrap();
    for shape in [[4, 6], [2, 3], [1, 6], [4, 1], [4, 3], [1, 1], [4, 2]] {
        for part in (0..).map_while(|number| Part::of_equal(&[4, 6], &shape, number)) {
            let numel = part.numel().0;
            for (start, end) in [(0, numel), (numel / 3, numel), (numel / 2, numel / 2 + 1)] {
                let mut found = vec![None; numel];
                checkpoint
                    .read(tensor, (&part, start..end), &mut |at, bytes| {
                        for (at, bytes) in (at..).zip(bytes.chunks(4)) {
                            assert_eq!(found[at].replace(bytes.to_vec()), None, "read twice");
                        }
                    })
                    .unwrap();
                for run in part.common(&Part::all(&[4, 6])) {
                    for at in 0..run.numel {
                        let is_wanted = (start..end).contains(&(run.in_first + at));
                        let value = element(tensor, run.in_second + at, 4, 5);
                        assert_eq!(found[run.in_first + at], is_wanted.then_some(value));
                    }
                }
            }
        }
    }
}

#[test]
fn a_tensor_of_another_shape_is_refused() {
    let (_run, folder) = saved();
    let mut checkpoint = Checkpoint::open(&folder).unwrap();
    for shape in [&[8][..], &[7, 1], &[]] {
        let error = checkpoint.read(0, (&Part::all(shape), 0..1), &mut |_, _| ()).unwrap_err();
        assert!(matches!(error, CheckpointError::Asked { .. }), "{error}");
        assert!(error.to_string().contains("master weights of `a`"), "{error}");
    }
}

#[test]
fn weights_are_masters_where_there_are_some() {
    let (_run, folder) = saved();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let role = |name: &str| {
        let index = checkpoint.weights_of(name)?;
        Some(checkpoint.manifest().tensors[index].role.clone())
    };
    assert_eq!(role("a"), Some(Role::Master));
    assert_eq!(role("frozen"), Some(Role::Weights));
    assert_eq!(role("none"), None);
}
