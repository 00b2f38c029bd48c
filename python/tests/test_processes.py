"""Forks and signals of a rank's process."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from mishaps import made, train

import oxizero


FORK = """
import os, sys, signal, torch, oxizero
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
config = {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
engine = oxizero.initialize(model=model, config=config)[0]
def train():
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
if os.environ["RANK"] == "0" and (child := os.fork()) == 0:
    try:
        train()
    except oxizero.EngineError as error:
        sys.exit(7 if "forked from a rank's" in str(error) else 1)
    sys.exit(2)
train()
assert model.weight.tolist() == [[-1.0, -1.0]]
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
try:
    train()
except oxizero.CommError as error:
    print(error)
"""


def test_a_fork_is_no_rank_and_its_end_hides_no_death():
    names = {"WORLD_SIZE": "2", "MASTER_PORT": f"of {os.getpid()}"}
    run = [sys.executable, "-c", FORK]
    other = subprocess.Popen(run, env=os.environ | names | {"RANK": "1"})
    output = subprocess.check_output(run, env=os.environ | names | {"RANK": "0"}, timeout=100)
    assert b"rank 1 ended" in output
    assert other.wait() == -signal.SIGKILL


def interrupted(rank):
    engine = made()
    if rank == 1:
        time.sleep(6)
    else:
        # When it waits: what torch imports in the first step may swallow the exception.
        threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt if rank == 0 else oxizero.CommError) as raised:
        train(engine)
    assert rank == 1 or time.monotonic() - started < 5
    return str(raised.value)


def test_ctrl_c_ends_a_wait_and_the_others_hear_of_it(ranks):
    assert "rank 0 gave up: it was interrupted" in ranks(2, interrupted)[1]


def looked_at(rank):
    engine = made()
    if rank == 1:
        time.sleep(2)
        return train(engine)
    threading.Timer(0.2, lambda: engine.loss_scale).start()
    training = threading.Thread(target=train, args=(engine,))
    training.start()
    longest = 0.0
    while training.is_alive():
        started = time.monotonic()
        time.sleep(0.01)
        longest = max(longest, time.monotonic() - started)
    assert longest < 1.5


def test_looking_at_an_engine_that_waits_stops_no_other_thread(ranks):
    ranks(2, looked_at)


def called_back(rank):
    engine = made()
    if rank == 1:
        time.sleep(1)
        return train(engine)
    said = []

    def handle(*_):
        for call in (lambda: engine.loss_scale, engine._core.barrier):
            with pytest.raises(oxizero.EngineError) as refused:
                call()
            said.append(str(refused.value))

    signal.signal(signal.SIGUSR1, handle)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    train(engine)
    assert engine.loss_scale == 1.0
    return said


def test_a_signals_handler_that_calls_the_engine_in_a_call_is_refused(ranks):
    first, second = ranks(2, called_back)[0]
    assert first == second and "the engine is in a call of this thread" in first


def forked(rank):
    engine = made()
    if rank == 1:
        time.sleep(1)
        return train(engine)
    training = threading.Thread(target=train, args=(engine,))
    training.start()
    time.sleep(0.3)
    assert training.is_alive()
    if (child := os.fork()) == 0:
        signal.alarm(5)
        try:
            engine.loss_scale
        except oxizero.EngineError as error:
            os._exit(7 if "forked from a rank's" in str(error) else 1)
        os._exit(2)
    training.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_in_the_middle_of_a_call_is_refused_too(ranks):
    assert ranks(2, forked)[0] == 7
