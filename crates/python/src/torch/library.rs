//! `torch.distributed` as the library of a communicator.

use std::ops::Range;
use std::panic::resume_unwind;
use std::time::Duration;

use oxizero::comm::library::{Library, LibraryError};
use oxizero::{Bytes, Device, ProcessGroup, Rank, View, ViewMut};
use oxizero_device::Region;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::TorchDevice;
use super::device::at_view;

/// One rank's `oxizero.torch_backend.Group`.
pub(crate) struct TorchGroup {
    pub(crate) group: Py<PyAny>,
    pub(crate) device: TorchDevice,
    pub(crate) members: ProcessGroup,
    /// The place among the members.
    pub(crate) rank: Rank,
    pub(crate) deadline: Duration,
}

impl TorchGroup {
    /// Calls a method of the group, and asks it to explain what failed.
    fn call<T>(
        &self,
        deed: impl for<'py> FnOnce(Python<'py>, &Bound<'py, PyAny>) -> PyResult<T>,
    ) -> Result<T, LibraryError> {
        Python::attach(|py| {
            let group = self.group.bind(py);
            deed(py, group).map_err(|error| {
                if !error.is_instance_of::<PyException>(py) {
                    // Ctrl-C is no error of the library's; the others hear of it.
                    self.give_up(group, &error.to_string());
                    resume_unwind(Box::new(error));
                }
                explained(py, group, error)
            })
        })
    }

    /// Tells the others why this rank takes part no longer.
    fn give_up(&self, group: &Bound<'_, PyAny>, why: &str) {
        let me = self.members.ranks()[self.rank.0].0;
        // What it fails with is not news: the group fails anyway.
        let _unheeded = group.call_method1("abort", (me, why));
    }
}

fn explained(py: Python<'_>, group: &Bound<'_, PyAny>, error: PyErr) -> LibraryError {
    let text = error.to_string();
    let told = group.call_method1("explain", (error.into_value(py),));
    match told.and_then(|told| told.extract::<(Option<String>, usize, String)>()) {
        Ok((Some(kind), rank, _)) if kind == "dead" => LibraryError::Dead(Rank(rank)),
        Ok((Some(kind), rank, _)) if kind == "late" => LibraryError::Late(Rank(rank)),
        Ok((Some(_), rank, why)) => LibraryError::Aborted(Rank(rank), why),
        Ok((None, _, why)) => LibraryError::Failed(why),
        Err(_) => LibraryError::Failed(text),
    }
}

impl Library for TorchGroup {
    fn name(&self) -> &'static str {
        "torch.distributed"
    }

    fn members(&self) -> &ProcessGroup {
        &self.members
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn deadline(&self) -> Duration {
        self.deadline
    }

    fn alloc(&self, bytes: Bytes) -> Result<Region, LibraryError> {
        Ok(Region::on_device(self.device.alloc(bytes)))
    }

    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, LibraryError> {
        self.call(|py, group| group.call_method1("exchange", (PyBytes::new(py, bytes),))?.extract())
    }

    fn all_to_all(
        &self,
        source: View<'_>,
        elements: Range<usize>,
        target: ViewMut<'_>,
    ) -> Result<(), LibraryError> {
        self.call(|py, group| {
            let (source, target) = (at_view(py, source), at_view(py, target.as_view()));
            let args = (source, (elements.start, elements.end), target);
            group.call_method1("all_to_all", args).map(drop)
        })
    }

    fn all_gather(&self, shard: Option<View<'_>>, full: ViewMut<'_>) -> Result<(), LibraryError> {
        self.call(|py, group| {
            let args = (shard.map(|shard| at_view(py, shard)), at_view(py, full.as_view()));
            group.call_method1("all_gather", args).map(drop)
        })
    }

    fn broadcast(&self, buffer: ViewMut<'_>, root: Rank) -> Result<(), LibraryError> {
        let root = self.members.ranks()[root.0].0;
        self.call(|py, group| {
            group.call_method1("broadcast", (at_view(py, buffer.as_view()), root)).map(drop)
        })
    }

    fn split(&self, group: &ProcessGroup) -> Result<Self, LibraryError> {
        let ranks: Vec<_> = group.ranks().iter().map(|rank| rank.0).collect();
        let split = self.call(|_, parent| Ok(parent.call_method1("split", (ranks,))?.unbind()))?;
        let me = self.members.ranks()[self.rank.0];
        let rank = group.rank_of(me).expect("the caller is a member of the new group");
        let (device, deadline) = (self.device.clone(), self.deadline);
        Ok(Self { group: split, device, members: group.clone(), rank, deadline })
    }

    fn abort(&self, why: &str) {
        Python::attach(|py| self.give_up(self.group.bind(py), why));
    }
}

impl Drop for TorchGroup {
    fn drop(&mut self) {
        // An interpreter that ends has let go of it, or does.
        Python::try_attach(|py| self.group.bind(py).call_method0("close").map(drop));
    }
}
