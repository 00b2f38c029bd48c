//! Collectives for scripts, beside those of engines.

use oxizero::comm::{CommError, Communicator};
use oxizero::{Buffer, DType, Numel};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error;
use crate::tensor::Tensor;
use crate::world::Native;

/// All ranks, in a world of their own. Calls release the interpreter's lock.
#[pyclass(frozen, module = "oxizero._oxizero")]
pub(crate) struct Ranks(Box<dyn Communicator>);

#[pymethods]
impl Ranks {
    /// Meets the others; a collective call.
    #[new]
    fn new(py: Python<'_>, world: Native) -> PyResult<Self> {
        py.detach(|| world.connect()).map(Self)
    }

    /// Returns when every rank has called it.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.barrier()).map_err(error::comm)
    }

    /// Writes every rank's bytes, in rank order, to `all`; equally many on each.
    fn all_gather(&self, py: Python<'_>, own: Tensor<'_>, mut all: Tensor<'_>) -> PyResult<()> {
        let len = own.bytes().len();
        if all.bytes().len() != len * self.0.world_size().get() {
            let why = format!("{} bytes for {len} of each rank", all.bytes().len());
            return Err(PyValueError::new_err(why));
        }
        let own = own.bytes();
        let gathered = py.detach(|| gather(&*self.0, own)).map_err(error::comm)?;
        let each = gathered.region().bytes().chunks_exact(padded(len).bytes(DType::F32).0.max(1));
        for (target, source) in all.bytes_mut().chunks_exact_mut(len.max(1)).zip(each) {
            target.copy_from_slice(&source[..len]);
        }
        Ok(())
    }
}

/// Every rank's bytes, each padded to whole f32 elements.
fn gather(comm: &dyn Communicator, own: &[u8]) -> Result<Buffer, CommError> {
    let numel = padded(own.len());
    let mut shard = Buffer::heap(numel, DType::F32);
    shard.region_mut().range_mut(0..own.len()).copy_from_slice(own);
    let all = Buffer::heap(Numel(numel.0 * comm.world_size().get()), DType::F32);
    let (_, all) = comm.all_gather_into(shard, all)?.wait()?;
    Ok(all)
}

fn padded(bytes: usize) -> Numel {
    Numel(bytes.div_ceil(DType::F32.size()))
}
