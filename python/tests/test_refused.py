"""What one rank refuses is refused on all, and training goes on."""

import math

import pytest
import torch
from test_access import Constant, start

import oxizero

REFUSALS = (oxizero.EngineError, oxizero.ConfigError)


def of_a_rate(rank, stage, back_end):
    config = {"gradient_accumulation_steps": 2, "oxizero": {"backend": back_end}}
    engine = start(Constant(4), stage, **config)
    group = engine.optimizer.param_groups[0]
    for is_last in [False, True]:
        engine.backward(engine(1.0 + rank))
        if rank == 1:
            group["lr"] = math.nan
        if is_last:
            said = "lr" if rank == 1 else "rank 1 refused the call"
            with pytest.raises(REFUSALS, match=said):
                engine.step()
            group["lr"] = 1.0
        engine.step()
    assert engine.state_dict()["weight"].tolist() == [-1.5] * 4


@pytest.mark.parametrize("back_end", ["native", "torch"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_that_one_rank_refuses_is_none_and_may_be_taken_again(ranks, stage, back_end):
    ranks(2, of_a_rate, stage, back_end)


class Fails(Constant):
    def forward(self, gradient, fails=False):
        loss = super().forward(gradient)
        if fails:
            loss.register_hook(self.fail)
        return loss

    def fail(self, _):
        raise ZeroDivisionError


def without_gradients(rank, stage, backward_fails):
    engine = start(Fails(4), stage)
    is_odd = rank == 1
    if is_odd and backward_fails:
        with pytest.raises(ZeroDivisionError):
            engine.backward(engine(1.0, fails=True))
    elif not is_odd:
        engine.backward(engine(1.0))
    said = "backward" if is_odd else "rank 1 refused the call"
    for _ in range(2):
        with pytest.raises(oxizero.EngineError, match=said):
            engine.step()
    engine.discard_window()
    engine.backward(engine(1.0 + rank))
    engine.step()
    assert engine.global_steps == 1
    assert engine.state_dict()["weight"].tolist() == [-1.5] * 4


@pytest.mark.parametrize("backward_fails", [False, True])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_that_comes_without_gradients_says_so_to_all(ranks, stage, backward_fails):
    ranks(2, without_gradients, stage, backward_fails)


def of_a_norm(rank):
    engine = start(Constant(4), 1)
    engine.backward(engine(1.0))
    said = "norm_type = 4" if rank == 1 else "rank 1 refused the call"
    with pytest.raises((ValueError, oxizero.EngineError), match=said):
        engine.clip_grad_norm_(1.0, norm_type=4.0 if rank == 1 else 2.0)
    engine.step()


def test_a_norm_that_one_rank_asks_for_alone_is_refused(ranks):
    ranks(2, of_a_norm)


def within_gathered(rank, stage):
    engine = start(Constant(4), stage)
    weight = engine.module.weight
    raised = (ZeroDivisionError, oxizero.EngineError)[rank == 0]
    with pytest.raises(raised, match="rank 1 refused the call" if rank == 0 else None):
        with oxizero.zero.GatheredParameters([weight], modifier_rank=0):
            with torch.no_grad():
                weight.fill_(1.0 + rank)
            if rank == 1:
                raise ZeroDivisionError
    with oxizero.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(3.0)
    engine.backward(engine(1.0))
    engine.step()
    assert engine.state_dict()["weight"].tolist() == [2.0] * 4


@pytest.mark.parametrize("stage", [1, 3])
def test_what_one_rank_raises_while_weights_are_gathered_is_told_to_all(ranks, stage):
    ranks(2, within_gathered, stage)


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a_module_with_a_long_name = torch.nn.Linear(3, 3)
        self.a_module_with_another_name = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.a_module_with_another_name(self.a_module_with_a_long_name(x))


def differing(rank):
    engine = start(Named(), 3)
    called = engine.module if rank == 0 else engine.module.a_module_with_another_name
    with pytest.raises(oxizero.EngineError) as raised:
        called.state_dict()
    other = "another" if rank == 0 else "a_long"
    said = str(raised.value)
    assert f"it asked for the weights of `a_module_with_{other}_name.weight`" in said
    assert "every rank calls state_dict() and the like" in said


def test_the_calls_of_ranks_that_differ_are_named_in_full(ranks):
    ranks(2, differing)
