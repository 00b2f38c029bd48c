//! Whether all ranks have the same of what the engine itself does not hold.

use std::hash::{DefaultHasher, Hash, Hasher};

use oxizero::ProcessGroup;
use oxizero::comm::{CommError, Communicator};
use pyo3::prelude::*;

use crate::engine::Engine;
use crate::error;

#[pymethods]
impl Engine {
    /// Refuses to go on unless the ranks that hold the same of every parameter tell the same list
    /// of buffers; a collective call.
    fn agree(&self, py: Python<'_>, buffers: Vec<String>) -> PyResult<()> {
        let differs = self.run(py, |engine| Ok(differing(engine.alike(), &buffers)?))?;
        differs.map_or(Ok(()), |differs| Err(error::engine(differs)))
    }
}

/// What differs, where not all ranks of the group tell the same list.
fn differing(
    (group, comm): (ProcessGroup, &dyn Communicator),
    told: &[String],
) -> Result<Option<String>, CommError> {
    let hash = |one: &String| {
        let mut hasher = DefaultHasher::new();
        one.hash(&mut hasher);
        hasher.finish().to_le_bytes()
    };
    let counts = comm.exchange("initialize", &told.len().to_le_bytes())?;
    if let Some(place) = counts.iter().position(|count| *count != counts[0]) {
        let [first, other] = [0, place].map(|place| {
            let count = counts[place].first_chunk().copied().unwrap_or_default();
            usize::from_le_bytes(count)
        });
        let (one, another) = (group.ranks()[0], group.ranks()[place]);
        return Ok(Some(format!(
            "rank {one} has {first} buffers, and rank {another} {other}; all ranks have the same"
        )));
    }
    let hashes: Vec<u8> = told.iter().flat_map(hash).collect();
    let all = comm.exchange("initialize", &hashes)?;
    let differs = |(at, one): (usize, &String)| {
        let at = 8 * at..8 * (at + 1);
        let place = all.iter().position(|other| other[at.clone()] != all[0][at.clone()])?;
        let (first, rank) = (group.ranks()[0], group.ranks()[place]);
        Some(format!(
            "rank {rank} has another buffer than rank {first} in place of `{one}`; all ranks have \
             the same buffers, in the same order"
        ))
    };
    Ok(told.iter().enumerate().find_map(differs))
}
