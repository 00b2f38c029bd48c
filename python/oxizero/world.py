"""Which rank this process is, and how it finds the others: torchrun's environment."""

import hashlib
import os
import warnings
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from oxizero._oxizero import ConfigError
from oxizero.torch_backend import store

_deadline = timedelta(minutes=10)
_engines = 0
_starts = 0
_is_initialized = False

# Arguments of DeepSpeed's `init_distributed` that ask for nothing else than what is done.
_NO_REQUEST = {
    "distributed_port": (None, 29500),
    "init_method": (None, "env://"),
    "auto_mpi_discovery": (None, True, False),
    "verbose": (None, True, False),
    "dist_init_required": (None, True, False),
    "rank": (None, -1),
    "world_size": (None, -1),
}


@dataclass(frozen=True)
class Place:
    """Where this process is in the world."""

    rank: int
    local_rank: int
    size: int
    # Ranks on this process's machine.
    local_size: int


def place():
    """This process's place, from the environment that torchrun sets; without it a world of one."""
    size = _number("WORLD_SIZE", 1)
    if size < 1:
        raise ConfigError(f"WORLD_SIZE = {size} in the environment; a world has 1 rank or more")
    if size > 1 and "RANK" not in os.environ:
        raise ConfigError(f"WORLD_SIZE is {size}, and RANK is not set; start ranks with torchrun")
    rank = _number("RANK", 0)
    if not 0 <= rank < size:
        raise ConfigError(f"RANK = {rank} in the environment, in a world of WORLD_SIZE = {size}")
    return Place(
        rank=rank,
        local_rank=_number("LOCAL_RANK", rank),
        size=size,
        local_size=_number("LOCAL_WORLD_SIZE", size),
    )


# What tells one job of a machine from another, to whoever starts ranks.
_JOB = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
)


def count_engine():
    """Another engine is about to be made: engines of one process meet in the order in which they
    are, each in a world of its own, and one that is not made counts too."""
    global _engines, _is_initialized
    _engines += 1
    _is_initialized = True


def engines():
    """How many engines were counted."""
    return _engines


def meeting(name=None):
    """What ranks need to meet the others, in the world of that name; without a name, in that of
    the engine that was counted last."""
    global _is_initialized
    _is_initialized = True
    here = place()
    if here.local_size != here.size:
        raise ConfigError(
            f"{here.local_size} of {here.size} ranks are on this machine; the native back end "
            "connects the ranks of one machine, the torch back end those of many"
        )
    name = str(_engines) if name is None else name
    parts = [os.environ.get(part, "") for part in _JOB] + [str(os.getuid()), name]
    socket = "oxizero-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
    deadline = _deadline.total_seconds()
    return {"rank": here.rank, "size": here.size, "socket": socket, "deadline": deadline}


def deadline():
    """How long a rank waits for another."""
    return _deadline


def init_distributed(dist_backend=None, timeout=None, **others):
    """Starts `torch.distributed`, where ranks were started and it is not, with a back end of it,
    such as gloo or nccl; without one, with what the machine has. Says how long a
    rank waits for another (`timeout`, a timedelta). With "native" nothing is started: an engine on
    the native back end needs no `torch.distributed`, and its ranks meet in `initialize`."""
    global _deadline, _is_initialized
    for name, value in others.items():
        if value not in _NO_REQUEST.get(name, (None,)):
            raise ConfigError(
                f"init_distributed({name}={value!r}): ranks meet as the environment says, in "
                "torchrun's names: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
            )
    if timeout is not None:
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ConfigError(
                f"init_distributed(timeout={timeout!r}): give a datetime.timedelta above 0"
            )
        _deadline = timeout
    _is_initialized = True
    if dist_backend == "native":
        return
    if dist_backend is None and place().size == 1 and "MASTER_ADDR" not in os.environ:
        return  # nobody has started ranks
    # A script that asks for GPUs' on a machine without any means whatever there is.
    if not torch.cuda.is_available() and dist_backend in (None, "nccl"):
        if dist_backend and place().rank == 0:
            warnings.warn("there is no GPU here: gloo is started in place of nccl", stacklevel=2)
        dist_backend = "gloo"
    if dist_backend and not distributed.is_backend_available(dist_backend.split(":")[-1]):
        raise ConfigError(
            f"dist_backend = {dist_backend!r} is not available; there are native, and what "
            "torch.distributed has here, such as gloo"
        )
    _start(dist_backend)


def is_initialized():
    """Whether somebody asked for the world."""
    return _is_initialized


def start_distributed(device):
    """Starts `torch.distributed` for ranks whose models are on `device`, if it is not started."""
    _start("gloo" if device.type == "cpu" else None)


def open_store(timeout):
    """Where ranks leave word before groups of them connect."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ and not distributed.is_initialized():
            raise ConfigError(
                f"{name} is not set, by which ranks find each other; start ranks with torchrun"
            )
    return store.open_store(place(), timeout)


def _start(backend):
    global _starts
    here = place()
    if not distributed.is_initialized():
        opened = open_store(_deadline)
        _starts += 1
        store.ready(opened, f"torch.distributed {_starts}", here, _deadline)
        try:
            distributed.init_process_group(
                backend,
                store=distributed.PrefixStore(f"oxizero {_starts}", opened),
                timeout=_deadline,
                rank=here.rank,
                world_size=here.size,
            )
        except RuntimeError as error:
            raise store.unconnected(here, error) from error
    size, rank = distributed.get_world_size(), distributed.get_rank()
    if (size, rank) != (here.size, here.rank):
        raise ConfigError(
            f"torch.distributed has rank {rank} of {size}, the environment RANK={here.rank} and "
            f"WORLD_SIZE={here.size}; start it with the environment's"
        )


def _number(name, default):
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is not a number") from None
