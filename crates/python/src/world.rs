//! Where this rank is, and how it finds the others.

use std::sync::Arc;
use std::time::Duration;

use oxizero::comm::library::communicator;
use oxizero::comm::shm::{Options, Replicas};
use oxizero::comm::{Beside, Communicator, Computes, Streams, overlap, overlapped, shm, threads};
use oxizero::{Backend, Overlap, ProcessGroup, Rank, Storage, WorldSize};
use oxizero_core::deepspeed::WeightCopies;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::config::world_size;
use crate::engine::{caught, reason};
use crate::error;
use crate::optimizer::Rules;
use crate::process::interrupted;
use crate::torch::{TorchDevice, TorchGroup, TorchStreams};

/// What a back end's attribute `world` says.
#[derive(FromPyObject)]
pub(crate) enum World {
    Torch(Torch),
    Native(Native),
}

/// Ranks that `torch.distributed` connects, and where their tensors lie.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Torch {
    rank: usize,
    size: usize,
    deadline: f64,
    /// `oxizero.torch_backend.Device`.
    device: Py<PyAny>,
    /// `oxizero.torch_backend.Group` of all ranks.
    group: Py<PyAny>,
    /// What updates weights.
    update: Py<PyAny>,
    /// `oxizero.torch_backend.Streams`, of a device that does its work later.
    streams: Option<Py<PyAny>>,
    /// Ranks on this machine, where its processors compute.
    ranks_here: Option<usize>,
}

/// Ranks on one machine.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Native {
    rank: usize,
    size: usize,
    /// The name under which rank 0 listens; see [`Options::socket`].
    socket: String,
    /// How long a rank waits for another, in seconds.
    deadline: f64,
}

impl World {
    /// Who updates weights.
    pub(crate) fn rules(&self, py: Python<'_>) -> Rules {
        match self {
            Self::Torch(torch) => Rules::Torch(torch.update.clone_ref(py)),
            Self::Native(_) => Rules::Native,
        }
    }

    /// Joins the others, for these copies of weights; blocks until all have come. Operations run
    /// beside the caller's work if `asked` says so, or, where it says nothing, if something is free
    /// to run them.
    pub(crate) fn connect_for(
        self,
        copies: WeightCopies,
        asked: Option<Overlap>,
    ) -> PyResult<Backend> {
        let overlap = overlap(asked, self.computes()?);
        let (backend, streams) = match self {
            Self::Torch(torch) => torch.connect()?,
            Self::Native(native) => (Backend::host(native.connect_for(copies)?), None),
        };
        let communicator = match overlap {
            Overlap::Off => backend.communicator,
            Overlap::On => {
                let streams = streams.map(|streams| Arc::new(streams) as Arc<dyn Streams>);
                let beside = Beside { interrupted, why: reason, streams };
                caught(|| overlapped(backend.communicator, beside))?.map_err(error::comm)?
            }
        };
        Ok(Backend { communicator, ..backend })
    }

    /// What computes while ranks communicate.
    fn computes(&self) -> PyResult<Computes> {
        let ranks_here = match self {
            Self::Torch(torch) => torch.ranks_here,
            Self::Native(native) => Some(native.size),
        };
        let on = |ranks| Ok(Computes::Host { ranks_here: world_size(ranks)? });
        ranks_here.map_or(Ok(Computes::Device), on)
    }

    /// This process's place, and how many there are.
    pub(crate) fn place(&self) -> PyResult<(Rank, WorldSize)> {
        let (rank, size) = match self {
            Self::Torch(torch) => (torch.rank, torch.size),
            Self::Native(native) => (native.rank, native.size),
        };
        Ok((Rank(rank), world_size(size)?))
    }
}

impl Torch {
    fn connect(self) -> PyResult<(Backend, Option<TorchStreams>)> {
        let streams = self.streams.map(TorchStreams::new);
        let device = TorchDevice::new(self.device, streams.clone());
        let group = TorchGroup {
            group: self.group,
            device: device.clone(),
            members: ProcessGroup::world(world_size(self.size)?),
            rank: Rank(self.rank),
            deadline: seconds(self.deadline)?,
        };
        let storage = Storage::Device(Arc::new(device));
        Ok((Backend { storage, communicator: communicator(group), observer: None }, streams))
    }
}

impl Native {
    fn connect_for(self, copies: WeightCopies) -> PyResult<Box<dyn Communicator>> {
        let (size, deadline) = (world_size(self.size)?, seconds(self.deadline)?);
        if size == WorldSize::ONE {
            let mut alone = threads::group_with_deadline(size, deadline);
            return Ok(alone.pop().expect("a group of one has one communicator"));
        }
        let options = Options {
            deadline,
            replicas: match copies {
                WeightCopies::Machines => Replicas::Shared,
                WeightCopies::Ranks => Replicas::Private,
            },
            interrupted,
            ..Options::new(Rank(self.rank), size, self.socket)
        };
        shm::connect(options).map_err(error::comm)
    }
}

fn seconds(deadline: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(deadline)
        .map_err(|error| PyValueError::new_err(format!("deadline: {error}")))
}
