"""Ranks for tests: forks of the test's process, so that torch is imported once."""

import faulthandler
import multiprocessing
import os
import pickle
import socket
import traceback

import pytest
import torch

# Seconds after which a rank of a test hangs.
LONGEST = 300

torch.set_num_threads(1)
# With the first optimizer torch imports much more of itself: here, and not in every rank.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _child(pipe, rank, size, port, test, args):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    # Shows where every thread is, and exits with 1.
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    try:
        told = (True, test(rank, *args))
    except BaseException:
        told = (False, traceback.format_exc())
    # By value: tensors that are sent as such would lie in memory that goes with this process.
    pipe.send_bytes(pickle.dumps(told))
    pipe.close()


def run_ranks(size, test, *args):
    """Calls `test(rank, *args)` as so many ranks; what each returned, in rank order."""
    context = multiprocessing.get_context("fork")
    port = free_port()
    ranks = []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(sender, rank, size, port, test, args))
        process.start()
        sender.close()
        ranks.append((process, receiver))
    results, failures = [], []
    for rank, (process, receiver) in enumerate(ranks):
        try:
            fine, result = pickle.loads(receiver.recv_bytes())
        except EOFError:
            fine, result = True, None  # it ended on purpose, or the others tell
        results.append(result)
        process.join(60)
        if result is None and process.exitcode == 1:
            fine, result = False, f"it did not end within {LONGEST} seconds"
        if not fine:
            failures.append(f"rank {rank}:\n{result}")
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return results


@pytest.fixture
def ranks():
    return run_ranks
