"""What an engine runs on: the host and its Rust kernels, or torch on any device."""

import contextlib
import functools
import os

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from oxizero import _oxizero, configuration, torch_backend, world
from oxizero._oxizero import ConfigError
from oxizero.torch_backend import store

_VARIABLE = "OXIZERO_BACKEND"
_NAMES = ("native", "torch")


class Native:
    """CPU models: Rust kernels, and shared memory between the ranks of one machine."""

    name = "native"

    def __init__(self, device):
        self.device = device
        self.world = world.meeting()

    def ready(self, name):
        """Waits under that name until all ranks are ready. Returns the rank that gives up instead,
        and why; None if none does."""
        told = _oxizero.Ranks(world.meeting(name)).tell("")
        return next(((rank, why) for rank, why in enumerate(told) if why), None)

    def give_up(self, name, why, timeout):
        """Tells those that are ready that this rank is not."""
        _oxizero.Ranks(world.meeting(name) | {"deadline": timeout.total_seconds()}).tell(why)

    def give(self, tensor):
        """A tensor as the engine takes it: contiguous, on the CPU, without a graph."""
        return to_dlpack(tensor.detach().contiguous())

    def take(self, given):
        """What the engine gives, if anything, as a tensor."""
        return None if given is None else from_dlpack(given)

    def broadcast(self, core, tensors, root):
        """Overwrites contiguous tensors of any dtype with those of a rank. DLPack has booleans in
        bytes."""
        core.broadcast([self.give(_bytes(tensor)) for tensor in tensors], root)


class Torch:
    """Models on any device: torch's operations, and `torch.distributed`."""

    name = "torch"

    def __init__(self, device):
        self.device = device
        self._operations = torch_backend.Device(device)

    def ready(self, name):
        """Waits under that name until all ranks are ready. Returns the rank that gives up instead,
        and why; None if none does."""
        timeout = world.deadline()
        return store.ready(world.open_store(timeout), name, world.place(), timeout)

    def give_up(self, name, why, timeout):
        """Tells those that are ready that this rank is not."""
        store.give_up(world.open_store(timeout), name, world.place(), why, timeout)

    @functools.cached_property
    def world(self):
        """The ranks, connected; a collective call when it is first asked for."""
        here, device = world.place(), self.device
        if here.size > 1:
            world.start_distributed(device)
        try:
            group = torch_backend.Group(here.rank, range(here.size), device, world.deadline())
        except RuntimeError as error:
            raise store.unconnected(here, error) from error
        return {
            "rank": here.rank,
            "size": here.size,
            "deadline": world.deadline().total_seconds(),
            "device": self._operations,
            "group": group,
            "update": torch_backend.update,
            "streams": torch_backend.streams.of(device),
            # Ranks that compute on this machine's processors.
            "ranks_here": here.local_size if device.type == "cpu" else None,
        }

    def give(self, tensor):
        """A tensor as the engine takes it: contiguous, without a graph, as flat bytes."""
        return self._operations.give(tensor)

    def take(self, given):
        """What the engine gives, if anything: tensors of its memory."""
        return given

    def broadcast(self, core, tensors, root):
        """Overwrites contiguous tensors of any dtype and device with those of a rank."""
        sizes = [_bytes(tensor).numel() for tensor in tensors]
        end = sum(sizes)
        packed = torch.zeros(-(-end // 4) * 4, dtype=torch.uint8, device=self.device)
        places = packed[:end].split(sizes)
        for tensor, place in zip(tensors, places, strict=True):
            place.copy_(_bytes(tensor))
        core.broadcast_given(self.give(packed.view(torch.float32)), root)
        for tensor, place in zip(tensors, places, strict=True):
            _bytes(tensor).copy_(place)


def choose(module, config):
    """The back end of a model: by its device, unless the configuration or the environment says."""
    return of(_device(module), config.backend)


def of(device, configured=None):
    """The back end of tensors on a device, unless the configuration or the environment says."""
    name = _asked(configured) or ("native" if device.type == "cpu" else "torch")
    if name == "native" and device.type != "cpu":
        raise ConfigError(
            f"the native back end trains on the CPU, and the model is on {device}; use the torch "
            "back end, or move the model"
        )
    return {"native": Native, "torch": Torch}[name](device)


def likely(model, config):
    """The back end that other ranks choose, as far as it can be told where something is wrong."""
    device, name = torch.device("cpu"), None
    with contextlib.suppress(Exception):
        device = _device(model)
    with contextlib.suppress(Exception):
        name = configuration.fields(config)["oxizero"]["backend"]
    try:
        return of(device, name)
    except Exception:
        return Native(torch.device("cpu"))


def _asked(configured):
    told = os.environ.get(_VARIABLE)
    if told is not None and told not in _NAMES:
        raise ConfigError(f"{_VARIABLE}={told!r} in the environment; there are native and torch")
    if told is not None and configured not in (None, told):
        raise ConfigError(
            f"{_VARIABLE}={told!r} in the environment, and `oxizero.backend = "
            f'"{configured}"` in the configuration; drop one of them'
        )
    return told or configured


def _device(module):
    """The one device of all parameters."""
    found = {}
    for name, param in module.named_parameters():
        found.setdefault(param.device, name)
    if len(found) > 1:
        (first, name), (second, other) = list(found.items())[:2]
        raise ConfigError(
            f"parameter `{name}` is on {first} and `{other}` on {second}; move the model to one "
            "device before initialize()"
        )
    (device,) = found or (torch.device("cpu"),)
    if device.type == "meta":
        raise ConfigError(
            f"parameter `{found[device]}` is on the meta device; build the model in "
            "oxizero.zero.Init(), or give it memory with model.to_empty() and initialize it"
        )
    return device


def _bytes(tensor):
    # One dimension, since a scalar has no bytes to view.
    return tensor.view(-1).view(torch.uint8)
