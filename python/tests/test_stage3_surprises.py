"""What models and scripts do to weights that are whole for a while only."""

import copy

import pytest
import torch
from torch import nn

import oxizero
from oxizero.utils import safe_get_full_grad

CONFIG = {
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "zero_optimization": {"stage": 3},
}


def made(model, **config):
    return oxizero.initialize(model=model, config=CONFIG | config)[0]


def linear():
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    return layer


class Clamps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.weight.data.clamp_(max=0.5)
        return x * self.weight


def test_a_module_that_writes_its_weights_as_data_is_refused():
    engine = made(Clamps())
    with pytest.raises(oxizero.EngineError, match="`weight` was written.*modifier_rank"):
        engine(torch.ones(4))


def test_what_is_written_as_data_while_gathered_is_refused():
    engine = made(linear())
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    weight = engine.module.weight
    with pytest.raises(oxizero.EngineError, match="`weight` was written"):
        with oxizero.zero.GatheredParameters([weight]):
            weight.data.fill_(7.0)
    with pytest.raises(oxizero.EngineError, match="other memory"):
        with oxizero.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data = torch.zeros(4, 4)


def written_between(rank):
    engine = made(linear())
    x = torch.ones(1, 4, requires_grad=True)
    loss = engine(x).square().sum()
    with oxizero.zero.GatheredParameters([engine.module.weight], modifier_rank=0):
        if rank == 0:
            engine.module.weight.data.fill_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


def test_a_graph_notices_on_every_rank_what_one_rank_wrote(ranks):
    ranks(2, written_between)


def copied(rank):
    engine = made(nn.Sequential(linear(), linear()))
    with oxizero.zero.GatheredParameters(engine.module):
        other = copy.deepcopy(engine.module)
    if rank == 0:
        assert other(torch.ones(1, 4)).tolist() == [[16.0] * 4]
        assert other.state_dict()["0.weight"].tolist() == [[1.0] * 4] * 4
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()


def test_a_copy_has_weights_of_its_own_and_gathers_none(ranks):
    ranks(2, copied)


def test_gradients_of_gradients_are_refused_by_module():
    engine = made(nn.Sequential(linear(), nn.Tanh(), linear()))
    x = torch.ones(1, 4, requires_grad=True)
    with pytest.raises(oxizero.EngineError, match="create_graph=True comes to module `2`"):
        torch.autograd.grad(engine(x).sum(), x, create_graph=True)


class Late(nn.Module):
    """A leaf that is registered first, runs last, and shares a weight."""

    def __init__(self):
        super().__init__()
        self.leaf = nn.Sequential(linear())
        self.first = linear()
        self.leaf[0].weight = self.first.weight

    def forward(self, x):
        return self.leaf(self.first(x)).sum()


def test_a_leaf_may_share_a_weight_with_a_module_that_runs_earlier():
    model = Late()
    plain = copy.deepcopy(model)
    oxizero.utils.set_z3_leaf_module(model.leaf, True)
    engine = made(model)
    engine.backward(engine(torch.ones(1, 4)))
    engine.step()
    plain(torch.ones(1, 4)).backward()
    expected = plain.first.weight - plain.first.weight.grad
    assert torch.equal(engine.state_dict()["first.weight"], expected)


class Borrows(torch.nn.Module):
    """Uses a layer's weight without calling it."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.other = torch.nn.Linear(3, 5)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.layer.weight).sum()


def test_a_view_of_weights_that_are_gone_is_explained():
    engine = made(Borrows())
    with pytest.raises(RuntimeError, match="setStorage") as raised:
        engine(torch.ones(1, 2))
    (note,) = raised.value.__notes__
    assert note.startswith("The weights of `layer.weight` are sharded")
    assert "register_external_parameter" in note


class Squeezes(torch.nn.Module):
    """Uses another module's weight by a view of another shape than it has."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(8, 4))
        self.conv = torch.nn.Conv1d(8, 8, 4, groups=8)

    def forward(self, x):
        return x @ self.own @ self.conv.weight.squeeze(1).t()


class Slices(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 8)
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.last(x) + self.table.weight[2:6].unsqueeze(0).sum()


@pytest.mark.parametrize(
    ("model", "name"), [(Squeezes, "`conv.weight`"), (Slices, "`table.weight`")]
)
def test_a_view_of_another_shape_is_explained_too(model, name):
    engine = made(model())
    with pytest.raises(RuntimeError) as raised:
        engine(torch.ones(3, 8))
    assert any(name in note for note in raised.value.__notes__)


class Tied(nn.Module):
    """A weight is tied to an earlier one, in a module that has no other and is not the last."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.third(self.second(self.first(x)))


def test_tied_modules_may_come_anywhere():
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    engine = made(model)
    x = torch.ones(2, 8)
    engine.backward(engine(x).sum())
    plain(x).sum().backward()
    for theirs, param in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(safe_get_full_grad(param), theirs.grad)
