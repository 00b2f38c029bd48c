//! The ranks as a group of their own, before there is an engine.

use oxizero::comm::Communicator;
use oxizero::{Buffer, Rank};
use pyo3::prelude::*;

use crate::error;
use crate::tensor::Tensor;
use crate::world::Native;

/// Moves tensors between all ranks. Every rank makes the same calls in the same order.
#[pyclass(frozen, module = "oxizero._oxizero")]
pub(crate) struct Group {
    comm: Box<dyn Communicator>,
}

#[pymethods]
impl Group {
    /// Joins the others; blocks until all have come.
    #[new]
    fn new(py: Python<'_>, world: Native) -> PyResult<Self> {
        Ok(Self { comm: py.detach(|| world.connect())? })
    }

    /// Overwrites a tensor with rank `root`'s.
    fn broadcast(&self, py: Python<'_>, tensor: Tensor<'_>, root: usize) -> PyResult<()> {
        let buffer = tensor.buffer()?;
        let sent = py.detach(|| self.comm.broadcast(buffer, Rank(root))?.wait());
        sent.map(drop).map_err(error::comm)
    }

    /// Writes every rank's `shard`, in rank order, to `full`.
    fn all_gather(&self, py: Python<'_>, shard: Tensor<'_>, full: Tensor<'_>) -> PyResult<()> {
        let (shard, full) = (Buffer::copy_of(shard.view()?), full.buffer()?);
        let gathered = py.detach(|| self.comm.all_gather_into(shard, full)?.wait());
        gathered.map(drop).map_err(error::comm)
    }
}
