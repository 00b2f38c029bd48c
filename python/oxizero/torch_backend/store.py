"""What ranks say to each other in torch's store, before groups of them connect."""

import os
import time

from torch import distributed

from oxizero._oxizero import CommError

_LOOK_EVERY = 0.01

# By address: stores that were opened here. That of rank 0 is the ranks' own.
_opened = {}


def open_store(here, timeout):
    """The store of all ranks. Where `torch.distributed` is not started, rank 0 keeps it, or the
    launcher does, whose store has what ranks said before they were restarted, too."""
    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if at not in _opened:
        is_launchers = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            _opened[at] = distributed.TCPStore(
                *at,
                is_master=here.rank == 0 and not is_launchers,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"rank {here.rank} could not open the store at {at[0]}:{at[1]} (MASTER_ADDR and "
                f"MASTER_PORT) within {timeout.total_seconds():g}s, which rank 0 or the launcher "
                f"keeps: {_line(error)}; see whether rank 0 has started"
            ) from error
    _opened[at].set_timeout(timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"oxizero attempt {attempt}", _opened[at])


def ready(store, name, here, timeout):
    """Says under `name` that this rank is ready, and waits until all are. Returns the rank that
    gives up instead, and why; None if none does."""
    try:
        return _ready(store, name, here, timeout)
    except distributed.DistError as error:
        raise CommError(
            f"rank {here.rank} waited for the others to start, and the store that rank 0 or the "
            f"launcher keeps is gone: {_line(error)}; see the output there"
        ) from error


def _ready(store, name, here, timeout):
    store.set(f"{name}/come/{here.rank}", "")
    store.add(f"{name}/come", 1)
    until = time.monotonic() + timeout.total_seconds()
    while store.add(f"{name}/come", 0) < here.size and not store.check([f"{name}/gave up"]):
        if time.monotonic() > until:
            raise _late(store, name, here, timeout)
        time.sleep(_LOOK_EVERY)
    if not store.check([f"{name}/gave up"]):
        return None
    rank, _, why = store.get(f"{name}/gave up").decode().partition(" ")
    store.add(f"{name}/heard", 1)
    return int(rank), why


def give_up(store, name, here, why, timeout):
    """Says that this rank gives up, and stays until all have heard it."""
    store.set(f"{name}/gave up", f"{here.rank} {why}")
    store.add(f"{name}/heard", 1)
    until = time.monotonic() + timeout.total_seconds()
    while store.add(f"{name}/heard", 0) < here.size and time.monotonic() < until:
        time.sleep(_LOOK_EVERY)


def unconnected(here, error):
    """What torch could not connect."""
    return CommError(
        f"torch.distributed did not connect rank {here.rank} with the others: {_line(error)}; a "
        "rank has ended, or was not started; see the ranks' output"
    )


def _late(store, name, here, timeout):
    absent = [rank for rank in range(here.size) if not store.check([f"{name}/come/{rank}"])]
    ranks = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    return CommError(
        f"{ranks} let rank {here.rank} wait for more than {timeout.total_seconds():g}s to start; "
        "see the output there; oxizero.init_distributed(timeout=...) says how long a rank waits"
    )


def _line(error):
    return (str(error).splitlines() or [repr(error)])[0]
