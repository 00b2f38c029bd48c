"""What ranks hear of one that does not begin: which it is, and why."""

import datetime
import itertools
import math
import os
import time

import pytest
import torch
from mishaps import made, train
from torch import nn

import oxizero

BACK_ENDS = ("native", "torch")


def of(back_end):
    return {"oxizero": {"backend": back_end}}


def refuses(rank, back_end, what):
    """One rank refuses its configuration, its model, or how parameters are split."""
    model, config = nn.Linear(2, 1, bias=False), of(back_end)
    if rank == 1:
        if what == "configuration":
            config["gradient_clipping"] = -1.0
        if what == "dtypes":
            config["data_types"] = {"grad_accum_dtype": "bf16"}
        if what == "rule":
            config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0, "momentum": math.inf}}
        if what == "copies":
            config["oxizero"] = {"backend": back_end, "share_weights": True}
        if what == "split":
            oxizero.mark_split(model.weight, 0, [1, 7])
        if what == "buffer":
            model.register_buffer("odd", torch.ones(1).expand(4))
    started = time.monotonic()
    with pytest.raises((oxizero.ConfigError, oxizero.CommError)) as raised:
        made(model, **config)
    assert time.monotonic() - started < 20
    # And then they meet as if nothing had been.
    engine = made(**of(back_end))
    train(engine)
    return type(raised.value).__name__, str(raised.value)


REFUSED = [
    *itertools.product(BACK_ENDS, ["configuration", "dtypes", "rule", "split", "buffer"]),
    ("torch", "copies"),
]


@pytest.mark.parametrize(("back_end", "what"), REFUSED)
def test_what_one_rank_refuses_is_told_to_all(ranks, back_end, what):
    first, second, third = ranks(3, refuses, back_end, what)
    assert second[0] == "ConfigError"
    for kind, said in (first, third):
        assert kind == "CommError"
        assert said == f"rank 1 gave up in initialize: ConfigError: {second[1]}"


def absent(rank, back_end):
    oxizero.init_distributed("native", timeout=datetime.timedelta(seconds=2))
    if rank == 1:
        os._exit(0)
    started = time.monotonic()
    with pytest.raises(oxizero.CommError) as raised:
        made(**of(back_end))
    assert time.monotonic() - started < 20
    return str(raised.value)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_rank_that_never_comes_is_named(ranks, back_end):
    first, _, third = ranks(3, absent, back_end)
    assert "rank 1" in first
    # Ranks meet at rank 0, which may have given up by then.
    assert "rank 1" in third or "rank 0" in third
    if back_end == "torch":
        assert first.startswith("rank 1 let rank 0 wait for more than 2s to start")


def without_first(rank):
    oxizero.init_distributed("native", timeout=datetime.timedelta(seconds=2))
    if rank == 0:
        os._exit(0)
    with pytest.raises(oxizero.CommError) as raised:
        made(**of("torch"))
    return str(raised.value)


def test_a_first_rank_that_never_comes_is_named(ranks):
    _, told = ranks(2, without_first)
    assert "rank 1 could not open the store" in told and "rank 0 has started" in told
