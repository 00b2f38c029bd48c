//! Collectives beside those of engines: for scripts, and before there is an engine.

use oxizero::comm::Communicator;
use oxizero::{Buffer, Rank};
use pyo3::prelude::*;

use crate::error;
use crate::process::OfProcess;
use crate::tensor::Tensor;
use crate::world::Native;

/// All ranks, in a world of their own. Every rank makes the same calls in the same order; each
/// releases the interpreter's lock, and is refused in a fork, which has no place among the ranks.
#[pyclass(frozen, module = "oxizero._oxizero")]
pub(crate) struct Ranks(OfProcess<Box<dyn Communicator>>);

#[pymethods]
impl Ranks {
    /// Joins the others; blocks until all have come.
    #[new]
    fn new(py: Python<'_>, world: Native) -> PyResult<Self> {
        Ok(Self(OfProcess::new(py.detach(|| world.connect())?)))
    }

    /// Returns when every rank has called it.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let comm = self.0.here()?;
        py.detach(|| comm.barrier()).map_err(error::comm)
    }

    /// Overwrites a tensor with rank `root`'s.
    fn broadcast(&self, py: Python<'_>, tensor: Tensor<'_>, root: usize) -> PyResult<()> {
        let (comm, buffer) = (self.0.here()?, tensor.buffer()?);
        let sent = py.detach(|| comm.broadcast(buffer, Rank(root))?.wait());
        sent.map(drop).map_err(error::comm)
    }

    /// Writes every rank's `shard`, in rank order, to `full`.
    fn all_gather(&self, py: Python<'_>, shard: Tensor<'_>, full: Tensor<'_>) -> PyResult<()> {
        let comm = self.0.here()?;
        let (shard, full) = (Buffer::copy_of(shard.view()?), full.buffer()?);
        let gathered = py.detach(|| comm.all_gather_into(shard, full)?.wait());
        gathered.map(drop).map_err(error::comm)
    }
}
