"""Stage 3: when backward has left a module, and what becomes of one that fails."""

import dataclasses
import os

import pytest
import torch
from test_access import start
from test_stage3 import CHOSEN, Experts, Mixture, agree, input_of, sizes
from torch import nn

import oxizero
from oxizero import utils


class Attends(nn.Module):
    """A leaf of torch's own between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


def penalty(engine, rank):
    """A loss beside which somebody has asked for gradients of the inputs."""
    x = input_of(rank, 2, 3, 4).requires_grad_()
    loss = engine(x).square().mean()
    (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.autograd.grad(engine(x).square().mean(), x)
    with torch.no_grad():
        assert engine(x - 0.01 * of_x).square().mean() < loss
    return loss


def asked(rank):
    agree(rank, Attends, penalty)


def test_gradients_of_inputs_may_be_asked_for_through_a_leaf(ranks):
    ranks(2, asked)


def asked_of_parts(rank):
    def make():
        model = Mixture()
        utils.set_z3_leaf_modules(model, [Experts])
        return model

    def forward(engine, rank):
        x = input_of(rank, 2, 4).requires_grad_()
        loss = engine(x, CHOSEN[rank])
        torch.autograd.grad(loss, x, retain_graph=True)
        return loss

    agree(rank, make, forward)


def test_gradients_of_inputs_are_asked_for_where_ranks_use_other_parts(ranks):
    ranks(3, asked_of_parts)


def reductions_of(engine, backward):
    """The leaf's buckets that ended in a backward, before the end of the pass."""
    ends = []
    for bucket in engine._sharded.buckets:
        bucket.grads_end = lambda bucket=bucket: ends.append(bucket.names[0])
    backward()
    return ends


def test_a_leaf_is_reduced_as_soon_as_gradients_come_to_it():
    engine = start(Attends(), 3)
    x = torch.ones(1, 3, 4, requires_grad=True)
    loss = engine(x).sum()
    ask = lambda: torch.autograd.grad(loss, x, retain_graph=True)  # noqa: E731
    assert reductions_of(engine, ask) == []
    assert len(reductions_of(engine, lambda: engine.backward(loss))) == 1


class Mapped(nn.Module):
    """A trained layer between two frozen ones, given its input as its caller likes."""

    @dataclasses.dataclass
    class Given:
        x: torch.Tensor
        name: str = "given"

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4, 4) / 2 for _ in range(3))
        for frozen in (self.weights[0], self.weights[2]):
            frozen.requires_grad_(False)

    def forward(self, given):
        x = given.x if hasattr(given, "x") else given["x"] if isinstance(given, dict) else given[0]
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x


class Opaque:
    def __init__(self, x):
        self.x = x


GIVERS = {
    "list": lambda x: [x, "name", None],
    "dict": lambda x: {"x": x},
    "dataclass": Mapped.Given,
    "object": Opaque,
}


class Gives(nn.Module):
    """Two such layers behind another one; notes what is whole when backward comes to that."""

    def __init__(self, kind):
        super().__init__()
        self.give, self.whole = GIVERS[kind], []
        self.first, self.inner = nn.Linear(4, 4), nn.ModuleList([Mapped(), Mapped()])

    def forward(self, x):
        x = self.first(x)
        x.register_hook(lambda _: self.whole.append(sizes(self.inner) != {0}))
        x = x.clone()
        for layer in self.inner:
            x = layer(self.give(x))
        return x


def given(rank, kind):
    whole = []

    def make():
        model = Gives(kind)
        whole.append(model.whole)
        return model

    agree(rank, make, lambda engine, rank: engine(input_of(rank, 2, 4)).square().mean())
    return whole[1]


@pytest.mark.parametrize("kind", GIVERS)
def test_inputs_may_lie_in_lists_and_other_objects_beside_frozen_weights(ranks, kind):
    for whole in ranks(2, given, kind):
        # Only of an object that nobody can look into is it not known when backward has left.
        assert whole == [kind == "object"] * 3


def test_a_leaf_tensor_in_a_list_keeps_no_hooks_of_calls():
    model = Mapped()
    engine = start(model, 3)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        engine.backward(engine([x]).sum())
        engine.step()
    assert not x._backward_hooks and x.grad is not None


class Keeps(torch.autograd.Function):
    """Uses a weight in backward for which it does not ask."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.t().t(), None


class KeepsAnothers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 5)

    def forward(self, x):
        return Keeps.apply(self.first(x)[:, :3], self.kept) + self.second(x)


def test_a_view_of_weights_that_are_gone_is_explained_in_backward_too():
    model = KeepsAnothers()
    engine = start(model, 3)
    with oxizero.zero.GatheredParameters(model.second.weight):
        model.kept = model.second.weight.detach()
        loss = engine(torch.ones(1, 3)).sum()
    with pytest.raises(RuntimeError, match="setStorage") as raised:
        engine.backward(loss)
    (note,) = raised.value.__notes__
    assert note.startswith("The weights of `second.weight` are sharded")


def survived(rank, dies_in):
    engine = start(Attends(), 3)

    def die(*_):
        if rank == 1:
            os._exit(0)

    if dies_in == "forward":
        engine.module.attention.register_forward_pre_hook(die)
    else:
        engine.module.attention.in_proj_weight.register_hook(die)
    with pytest.raises(oxizero.CommError, match="rank 1 ended") as raised:
        engine.backward(engine(input_of(rank, 2, 3, 4)).sum())
    return str(raised.value)


@pytest.mark.parametrize("dies_in", ["forward", "backward"])
def test_who_survives_another_rank_is_not_told_of_leaf_modules(ranks, dies_in):
    said, _ = ranks(2, survived, dies_in)
    assert "leaf" not in said and "in the turn of" in said
