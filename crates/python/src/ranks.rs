//! Collectives beside those of engines: for scripts, and before there is an engine.

use oxizero::comm::{CommError, Communicator};
use oxizero::{Buffer, Overlap, Rank};
use oxizero_core::deepspeed::WeightCopies;
use pyo3::prelude::*;

use crate::engine::caught;
use crate::error;
use crate::given::Given;
use crate::process::OfProcess;
use crate::world::World;

/// All ranks, in a world of their own. Every rank makes the same calls in the same order; each
/// releases the interpreter's lock, and is refused in a fork, which has no place among the ranks.
#[pyclass(frozen, module = "oxizero._oxizero")]
pub(crate) struct Ranks(OfProcess<Box<dyn Communicator>>);

#[pymethods]
impl Ranks {
    /// Joins the others; blocks until all have come.
    #[new]
    fn new(py: Python<'_>, world: World) -> PyResult<Self> {
        let connected = py.detach(|| world.connect_for(WeightCopies::Ranks, Some(Overlap::Off)))?;
        Ok(Self(OfProcess::new(connected.communicator)))
    }

    /// Returns when every rank has called it.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |comm| comm.barrier())
    }

    /// Every rank's text, in rank order; equally many calls on every rank.
    fn tell(&self, py: Python<'_>, text: &str) -> PyResult<Vec<String>> {
        let mut told = Vec::new();
        self.run(py, |comm| {
            let lens = comm.exchange("what ranks tell", &(text.len() as u64).to_le_bytes())?;
            let len =
                |bytes: &Vec<u8>| bytes.first_chunk().map_or(0, |len| u64::from_le_bytes(*len));
            let longest = lens.iter().map(len).max().unwrap_or(0) as usize;
            let mut own = text.as_bytes().to_vec();
            own.resize(longest, 0);
            let all = comm.exchange("what ranks tell", &own)?;
            let text = |(bytes, other): (&Vec<u8>, &Vec<u8>)| {
                String::from_utf8_lossy(&bytes[..len(other) as usize]).into_owned()
            };
            told = all.iter().zip(&lens).map(text).collect();
            Ok(())
        })?;
        Ok(told)
    }

    /// Overwrites a tensor with rank `root`'s.
    fn broadcast(&self, py: Python<'_>, tensor: Given<'_>, root: usize) -> PyResult<()> {
        let buffer = tensor.into_buffer()?;
        self.run(py, |comm| comm.broadcast(buffer, Rank(root))?.wait().map(drop))
    }

    /// Writes every rank's `shard`, in rank order, to `full`.
    fn all_gather(&self, py: Python<'_>, shard: Given<'_>, full: Given<'_>) -> PyResult<()> {
        let (shard, full) = (Buffer::copy_of(shard.view()?), full.into_buffer()?);
        self.run(py, |comm| comm.all_gather_into(shard, full)?.wait().map(drop))
    }
}

impl Ranks {
    fn run(
        &self,
        py: Python<'_>,
        deed: impl Send + FnOnce(&dyn Communicator) -> Result<(), CommError>,
    ) -> PyResult<()> {
        let comm = self.0.here()?;
        py.detach(|| caught(|| deed(&**comm)))?.map_err(error::comm)
    }
}
