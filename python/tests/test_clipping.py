"""Clipping by hand, and what is said to those who clip nothing."""

import math
import warnings

import pytest
import torch
from test_access import Constant, start

import oxizero
from oxizero import torch_calls, utils


class Pair(torch.nn.Module):
    """Two parameters, whose gradients are what it is called with."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(3))
        self.b = torch.nn.Parameter(torch.zeros(2, 2))

    def forward(self, a, b):
        return (self.a * a).sum() + (self.b * b).sum()


def clipped(rank, stage, norm_type, both):
    generator = torch.Generator().manual_seed(4)
    grads = [(torch.randn(3, generator=generator), torch.randn(2, 2, generator=generator))
             for _ in range(2)]
    plain = Pair()
    plain.a.grad, plain.b.grad = ((one + other) / 2 for one, other in zip(*grads, strict=True))
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    if both:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
    engine = start(Pair(), stage, gradient_clipping=0.2 if both else 0.0)
    engine.backward(engine(*grads[rank]))
    norm = engine.clip_grad_norm_(0.5, norm_type)
    torch.testing.assert_close(norm, expected)
    if not both:
        read = utils.safe_get_full_grad(engine.module.a)
        torch.testing.assert_close(read, plain.a.grad, rtol=1e-5, atol=1e-6)
    # A norm below the limit changes nothing.
    before = utils.safe_get_full_grad(engine.module.b)
    engine.clip_grad_norm_(math.inf, norm_type)
    assert utils.safe_get_full_grad(engine.module.b).equal(before)
    engine.step()
    for mine, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(-mine.detach(), other.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("stage,norm_type", [(0, 2.0), (1, "inf"), (2, 2.0), (2, 1.0), (0, 3)])
def test_clipped_gradients_are_torchs(ranks, stage, norm_type, both):
    ranks(2, clipped, stage, norm_type, both)


def at_the_wrong_time(rank):
    engine = start(Constant(2), 2, gradient_accumulation_steps=2)
    with pytest.raises(oxizero.EngineError, match="not ready"):
        engine.clip_grad_norm_(1.0)
    engine.backward(engine(1.0))
    engine.step()
    with pytest.raises(oxizero.EngineError, match="1 of 2 micro-batches"):
        engine.clip_grad_norm_(1.0)
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.EngineError, match="did not make the same call"):
        engine.clip_grad_norm_(1.0 + rank)
    with pytest.raises(oxizero.ConfigError, match="max_norm = -1"):
        engine.clip_grad_norm_(-1.0)
    with pytest.raises(ValueError, match="norm_type = 4"):
        engine.clip_grad_norm_(1.0, 4)
    # Gradients that are not finite stay so, and the step is skipped.
    utils.safe_set_full_grad(engine.module.weight, torch.tensor([1.0, math.inf]))
    assert engine.clip_grad_norm_(1.0) == math.inf
    engine.step()
    assert engine.skipped_steps == 1
    with pytest.raises(oxizero.EngineError, match="consumed by the last step"):
        engine.clip_grad_norm_(1.0)


def test_clipping_has_its_time(ranks):
    ranks(2, at_the_wrong_time)


def one_clips(rank):
    engine = start(Constant(2), 1)
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.EngineError, match="same calls in the same order"):
        if rank == 0:
            engine.clip_grad_norm_(1.0)
        else:
            engine.step()


def test_a_rank_that_clips_alone_is_told(ranks):
    ranks(2, one_clips)


def test_torchs_functions_warn_once_and_are_as_before_after_destroy(monkeypatch):
    monkeypatch.setattr(torch_calls, "_has_warned", False)
    others = [start(Constant(1), 1), *torch_calls._watchers]
    for left in others:
        torch_calls.unwatch(left)
    original = torch.nn.utils.clip_grad_norm_
    engine = start(Constant(2), 1)
    other = start(Constant(2), 2)
    engine.backward(engine(1.0))
    plain = torch.nn.Linear(1, 1)
    plain.weight.grad = torch.ones(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 2.0) == 1.0
    with pytest.warns(UserWarning, match="call engine.clip_grad_norm_") as told:
        assert torch.nn.utils.clip_grad_norm_(engine.parameters(), max_norm=1.0) == 0.0
        torch.nn.utils.clip_grad_norm_(parameters=engine.parameters(), max_norm=1.0)
    assert len(told) == 1 and told[0].filename == __file__
    engine.destroy()
    assert torch.nn.utils.clip_grad_norm_ is not original
    other.destroy()
    assert torch.nn.utils.clip_grad_norm_ is original
    assert torch.nn.utils.clip_grad.clip_grad_norm_ is original
