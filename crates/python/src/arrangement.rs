//! How the ranks are arranged, as Python sees it.

use oxizero::{Axes, Mesh, Rank};
use oxizero_core::{Holds, Mark};
use pyo3::FromPyObject;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::config::world_size;
use crate::error;

/// A mesh of the ranks, and what marked parameters do along its axes.
#[pyclass(frozen, module = "oxizero._oxizero")]
pub(crate) struct Arrangement {
    pub(crate) inner: oxizero_core::Arrangement,
    rank: Rank,
}

/// A process group that a parameter is marked with.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct MarkIn {
    param: Option<String>,
    ranks: Vec<usize>,
    /// `same`, `part` or `expert`.
    holds: String,
    /// The dimension of parts, and of experts that lie in a row.
    dim: Option<usize>,
}

impl MarkIn {
    fn read(self) -> PyResult<Mark> {
        let Self { param, ranks, holds, dim } = self;
        let holds = match (holds.as_str(), dim) {
            ("same", None) => Holds::Same,
            ("part", Some(dim)) => Holds::Part { dim },
            ("expert", Some(dim)) => Holds::Experts { dim },
            ("expert", None) => Holds::Expert,
            (other, dim) => {
                let why = format!("no mark `{other}` with the dimension {dim:?}");
                return Err(PyValueError::new_err(why));
            }
        };
        Ok(Mark { param, ranks: ranks.into_iter().map(Rank).collect(), holds })
    }
}

impl Arrangement {
    fn mesh(&self) -> &Mesh {
        self.inner.mesh()
    }

    /// The axes along which ranks work on different micro-batches.
    fn batches(&self) -> Axes {
        self.mesh().without(self.mesh().same_batches())
    }
}

#[pymethods]
impl Arrangement {
    /// The arrangement that makes every mark's group a group of one mesh.
    #[new]
    fn new(rank: usize, size: usize, marks: Vec<MarkIn>) -> PyResult<Self> {
        let marks = marks.into_iter().map(MarkIn::read).collect::<PyResult<Vec<_>>>()?;
        let (size, rank) = (world_size(size)?, Rank(rank));
        let inner = oxizero_core::Arrangement::new(size, rank, &marks).map_err(error::config)?;
        Ok(Self { inner, rank })
    }

    /// How many ranks work on micro-batches of their own.
    #[getter]
    fn batch_ranks(&self) -> usize {
        self.mesh().size_over(self.batches()).get()
    }

    /// Which of them this rank is.
    #[getter]
    fn batch_rank(&self) -> usize {
        self.mesh().place(self.batches(), self.rank).0
    }

    /// The ranks that differ from this one only in the micro-batches that they work on.
    #[getter]
    fn batch_group(&self) -> Vec<usize> {
        let group = self.mesh().group(self.batches(), self.rank);
        group.ranks().iter().map(|rank| rank.0).collect()
    }

    /// Names and sizes of the axes, the slowest first.
    #[getter]
    fn axes(&self) -> Vec<(String, usize)> {
        let axes = self.mesh().axes().iter();
        axes.map(|axis| (axis.name.clone(), axis.size.get())).collect()
    }
}
