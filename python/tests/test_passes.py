"""Where backward passes begin and end, of re-entrant checkpoints above all."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import oxizero
from oxizero import utils

STAGES = [0, 1, 2, 3]


class Checkpointed(nn.Module):
    """A layer that two segments use, one that one does, and a head behind them."""

    def __init__(self, twice=True):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 1)
        self.twice = twice

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in [self.first, self.second] + self.twice * [self.first]:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return self.head(x).sum()


def start(model, stage):
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "zero_optimization": {"stage": stage}}
    return oxizero.initialize(model=model, config=config)[0]


def counted(engine):
    """A list that grows with each pass that ends."""
    ends, end = [], engine._end_pass
    engine._end_pass = lambda: (ends.append(1), end())
    return ends


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("raw", [False, True])
def test_a_layer_in_two_reentrant_segments_gets_both_gradients(stage, raw):
    plain, x = Checkpointed(), torch.randn(4, 3)
    plain(x).backward()
    engine = start(Checkpointed(), stage)
    for _ in range(2):
        loss = engine(x)
        loss.backward() if raw else engine.backward(loss)
        for own, param in zip(engine.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(utils.safe_get_full_grad(own), param.grad)
        engine.zero_grad()
        engine.backward(engine(x) * 0.0)
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_reentrant_segments_are_one_pass(stage):
    engine = start(Checkpointed(twice=False), stage)
    engine.module.head.requires_grad_(False)  # so that the first gradient comes in a segment
    ends = counted(engine)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 3)))
        engine.step()
    assert len(ends) == 2


def test_a_backward_without_gradients_is_a_pass():
    engine = start(nn.Linear(2, 1), 1)
    engine.backward(torch.zeros((), requires_grad=True) * 1.0)
    engine.step()
    assert engine.global_steps == 1
    with pytest.raises(oxizero.EngineError, match="no backward has ended"):
        engine.step()


def test_a_backward_that_fails_before_its_first_gradient_fails_no_window():
    class Always(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError("no room")

    engine = start(nn.Linear(2, 1), 1)
    x = torch.ones(1, 2)
    with pytest.raises(MemoryError):
        engine.backward(Always.apply(engine(x).sum()))
    engine.backward(engine(x).sum())
    engine.step()
    assert engine.global_steps == 1


class Fails(torch.autograd.Function):
    """Fails in the backwards that it is told to."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.now:
            raise MemoryError("no room")
        return grad


class FailsBehindASegment(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        x = self.first(x.clone().requires_grad_())
        return {"loss": checkpoint(self.second, Fails.apply(x), use_reentrant=True).sum()}


def masters(engine):
    return [utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]


@pytest.mark.parametrize("again", ["forward", "step", "backward", "raw backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_fails_behind_a_segment_fails_the_window(stage, again):
    engine, x = start(FailsBehindASegment(), stage), torch.ones(2, 3)
    weights = masters(engine)
    losses = [engine(x)["loss"] for _ in range(2)]
    Fails.now = True
    with pytest.raises(MemoryError):
        losses[0].backward()
    Fails.now = False
    with pytest.raises(oxizero.EngineError, match="a backward pass has failed"):
        if again == "forward":
            engine(x)["loss"].backward()
        elif again == "backward":
            engine.backward(losses[1])
        elif again == "raw backward":
            losses[1].backward()
        engine.step()
    assert all(map(torch.equal, masters(engine), weights))
    engine.discard_window()
    engine.backward(engine(x)["loss"])
    engine.step()
    assert engine.global_steps == 1
