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
