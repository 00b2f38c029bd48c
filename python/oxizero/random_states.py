"""The states of the generators that a rank draws from: Python's, torch's, and NumPy's."""

import base64
import importlib
import random
import sys

import torch

from oxizero.log import log_dist, logging


def taken(device):
    """This rank's states, as JSON holds them: of `random`, of torch on the CPU and on the model's
    `device`, and of NumPy's global generator, if anybody has imported it. Generators that a script
    makes are its own to save."""
    states = {"python": random.getstate(), "torch": {"cpu": _text(torch.get_rng_state())}}
    of_device = _of_device(device)
    if of_device is not None:
        states["torch"][device.type] = _text(of_device.get_rng_state(device))
    if "numpy" in sys.modules:
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, words.tolist(), *rest]
    return states


def restore(states, ranks, size, device):
    """Goes on with the states that the rank of this number took; `ranks` is how many there were.
    In a world of another `size` each rank keeps its own: states of others would give two ranks the
    same draws, or none what it had."""
    if not states:
        return
    if ranks != size:
        log_dist(
            f"random states are those of {ranks} ranks, and stay as they are on these {size}; seed "
            "them, so that the draws are not those of the beginning",
            ranks=[0],
            level=logging.WARNING,
        )
        return
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    of_torch = states["torch"]
    torch.set_rng_state(_tensor(of_torch["cpu"]))
    of_device = _of_device(device)
    if of_device is not None and device.type in of_torch:
        of_device.set_rng_state(_tensor(of_torch[device.type]), device)
    if "numpy" in states:
        try:
            numpy = importlib.import_module("numpy")
        except ImportError:
            return
        kind, words, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(words, dtype="uint32"), *rest))


def _of_device(device):
    """torch's module of a device that is not the CPU, if it has a generator."""
    module = None if device.type == "cpu" else getattr(torch, device.type, None)
    return module if hasattr(module, "get_rng_state") else None


def _text(state):
    return base64.b64encode(bytes(state.cpu().tolist())).decode()


def _tensor(text):
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
