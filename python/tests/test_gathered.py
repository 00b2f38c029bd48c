"""Whole weights where they rest sharded: saved, loaded, gathered, and given back."""

import io

import pytest
import torch
from models import Gpt, build
from test_access import start
from test_stage3 import sizes, step

import oxizero
from oxizero import utils, zero


def states(rank, dtype):
    half = {"enabled": dtype == torch.bfloat16}
    model = build(Gpt)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    engine = start(model, 3, bf16=half)
    for told in (engine.state_dict(), model.state_dict()):
        assert told.keys() == expected.keys()
        assert all(told[name].equal(expected[name].to(dtype)) for name in expected)
    assert told["head.weight"].equal(told["embedding.weight"])
    torch.save(told, io.BytesIO())
    new = {name: torch.full_like(value, 3.0) for name, value in expected.items()}
    new["up.weight"] = expected["up.weight"]
    for target in (model, engine):
        target.load_state_dict(new)
        for name, param in model.named_parameters():
            master = utils.safe_get_full_fp32_param(param)
            wanted = new[name].to(dtype) if name != "up.weight" else new[name]
            assert master.equal(wanted.float()), name
    assert all(value.equal(new[name].to(dtype)) for name, value in model.state_dict().items())
    with pytest.raises(oxizero.EngineError, match="assign=True"):
        model.load_state_dict(new, assign=True)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(new | {"up.weight": torch.zeros(1)})
    assert sizes(model) == {0}
    step(engine, Gpt.batch(torch.Generator().manual_seed(rank)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_and_loaded_is_whole(ranks, dtype):
    ranks(2, states, dtype)


class Stubborn(torch.nn.Linear):
    """It has parts that fail, if it is told so."""

    fails = False

    def __init__(self):
        super().__init__(3, 3)
        self.inner = torch.nn.Linear(3, 3)
        self.inner.register_state_dict_post_hook(lambda *_: self._say())

    def forward(self, x):
        return self.inner(super().forward(x)).square().mean()

    def get_extra_state(self):
        return torch.zeros(1)

    def set_extra_state(self, state):
        self._say()

    def _say(self):
        if self.fails:
            raise ZeroDivisionError


def failed(rank):
    model = Stubborn()
    engine = start(model, 3)
    whole = model.state_dict()
    new = {name: torch.full_like(value, 2.0) for name, value in whole.items()}
    x = torch.ones(1, 3) + rank
    model.fails = True
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    step(engine, x)
    assert sizes(model) == {0}
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model.load_state_dict(new)
    model.fails = False
    whole = model.state_dict()
    assert sizes(model) == {0}
    # As torch has it: what was loaded before the failure counts.
    assert whole["weight"].eq(2.0).all() and whole["inner.weight"].ne(2.0).any()
    for wrong, said in (({}, "Missing key"), (new | {"bias": torch.zeros(7)}, "size mismatch")):
        with pytest.raises(RuntimeError, match=said):
            model.load_state_dict(wrong)
        assert sizes(model) == {0}
        step(engine, x)
    model.fails = True
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    engine.destroy()
    assert model(x).isfinite()


def test_a_save_or_load_that_fails_leaves_nothing_held(ranks):
    ranks(2, failed)


def gathered(rank, stage):
    model = build(Gpt)
    expected = model.up.weight.detach().clone()
    engine = start(model, stage)
    weight, bias = model.up.weight, model.up.bias
    with zero.GatheredParameters([weight, bias]), zero.GatheredParameters(model):
        assert weight.equal(expected)
    with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(1.0 + rank)
    with zero.GatheredParameters(model.parameters()):
        assert weight.equal(torch.full_like(weight, 2.0))
    for empty in ([], torch.nn.Parameter(torch.ones(1)), torch.nn.Identity()):
        with zero.GatheredParameters(empty, modifier_rank=0):
            pass
    with zero.GatheredParameters(weight, enabled=False):
        pass
    engine.backward(engine(Gpt.batch(torch.Generator().manual_seed(rank))) * 0)
    engine.step()
    assert utils.safe_get_full_fp32_param(weight).equal(torch.full_like(weight, 2.0))
    if stage < 3:
        return
    with pytest.raises(oxizero.EngineError, match="`up.weight` was written while"):
        with zero.GatheredParameters(model), torch.no_grad():
            weight.fill_(3.0)
    with zero.GatheredParameters(bias):
        engine.backward(engine(Gpt.batch(torch.Generator().manual_seed(rank))))
        with pytest.raises(oxizero.EngineError, match="`up.weight` are gathered"):
            engine.step()
    engine.step()
    with pytest.raises(ZeroDivisionError):
        with zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.fill_(9.0)
            raise ZeroDivisionError
    assert utils.safe_get_full_fp32_param(weight).max() < 9.0


@pytest.mark.parametrize("stage", [1, 3])
def test_gathered_parameters_are_whole_and_written_by_one_rank(ranks, stage):
    ranks(2, gathered, stage)


def unordered(rank, stage):
    """Each rank lists the parameters in an order of its own, as a set of them does."""

    class Turned(set):
        def __iter__(self):
            return iter(sorted(super().__iter__(), key=id, reverse=rank == 1))

    with zero.Init():
        first, second = (torch.nn.Sequential(*map(torch.nn.Linear, (2, 3), (3, 4)))
                         for _ in range(2))
    piece = list(second.parameters())
    engines = [start(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4)), stage)
               for _ in range(2)]
    engines.append(start(first, stage))
    params = [param for engine in engines for param in engine.module.parameters()] + piece
    with zero.GatheredParameters(Turned(params), modifier_rank=1), torch.no_grad():
        for number, param in enumerate(params):
            param.fill_(number + 100 * rank)
    with zero.GatheredParameters(Turned(params)):
        told = [param.unique().tolist() for param in params]
    assert told == [[number + 100.0] for number in range(len(params))]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_order_of_what_is_gathered_is_not_the_callers(ranks, stage):
    ranks(2, unordered, stage)


def given_back(rank):
    model = build(Gpt)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    start(model, 3).destroy()
    assert all(value.equal(expected[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.embedding.weight
    model(Gpt.batch(torch.Generator().manual_seed(rank))).backward()
    model.zero_grad()
    step(start(model, 3), Gpt.batch(torch.Generator().manual_seed(rank)))


def test_a_destroyed_engine_leaves_a_whole_model(ranks):
    ranks(2, given_back)
