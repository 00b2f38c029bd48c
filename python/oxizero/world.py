"""Which rank this process is, and how it finds the others: torchrun's environment."""

import hashlib
import os
from dataclasses import dataclass
from datetime import timedelta

from oxizero._oxizero import ConfigError

_deadline = timedelta(minutes=10)
_engines = 0


@dataclass(frozen=True)
class Place:
    """Where this process is in the world."""

    rank: int
    local_rank: int
    size: int


def place():
    """This process's place, from the environment that torchrun sets; without it a world of one."""
    size = _number("WORLD_SIZE", 1)
    if size > 1 and "RANK" not in os.environ:
        raise ConfigError(f"WORLD_SIZE is {size}, and RANK is not set; start ranks with torchrun")
    on_this_machine = _number("LOCAL_WORLD_SIZE", size)
    if on_this_machine != size:
        raise ConfigError(
            f"{on_this_machine} of {size} ranks are on this machine; the native back end connects "
            "the ranks of one machine"
        )
    rank = _number("RANK", 0)
    return Place(rank=rank, local_rank=_number("LOCAL_RANK", rank), size=size)


def meeting():
    """What the engine needs to meet the others. Engines of one process meet in the order in which
    they are made, each in a world of its own."""
    global _engines
    here = place()
    names = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]
    parts = [os.environ.get(name, "") for name in names] + [str(os.getuid()), str(_engines)]
    _engines += 1
    socket = "oxizero-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
    deadline = _deadline.total_seconds()
    return {"rank": here.rank, "size": here.size, "socket": socket, "deadline": deadline}


def init_distributed(dist_backend=None, timeout=None, **others):
    """Says how long a rank waits for another (`timeout`, a timedelta). Ranks meet in `initialize`,
    so that nothing else is to be done; `torch.distributed` is not started."""
    global _deadline
    if dist_backend not in (None, "native"):
        raise ConfigError(
            f"dist_backend = {dist_backend!r} is not available; the back end is native: shared "
            "memory on the CPU"
        )
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"init_distributed({name}={value!r}): ranks follow torchrun's names")
    if timeout is not None:
        _deadline = timeout


def _number(name, default):
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment is not a number") from None
