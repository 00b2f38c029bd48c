"""Models that torch.compile has made, whole or in parts."""

import pytest
import torch
from models import Gpt, adamw, batches, build, decay_groups, train_plain

import oxizero

STEPS = 3


def compiled(rank, stage):
    model = build(Gpt)
    optimizer = adamw(decay_groups(model))
    # A part, and around it the whole. What the default back end adds is a compiler of C++.
    model.up = torch.compile(model.up, backend="aot_eager")
    target = torch.compile(model, backend="aot_eager")
    config = {"zero_optimization": {"stage": stage}}
    engine, *_ = oxizero.initialize(model=target, optimizer=optimizer, config=config)
    losses = []
    for (batch,) in batches(Gpt, rank, STEPS, 1):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_model_trains_as_plain_torch_does(ranks, stage):
    expected, *_ = train_plain(Gpt, 1, torch.float32, 1, 0.0, STEPS)
    (losses,) = ranks(1, compiled, stage)
    assert losses == pytest.approx(expected[0], abs=2e-5)
