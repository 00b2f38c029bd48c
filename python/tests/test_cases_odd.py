"""Parameters that are empty, used twice, tied, unused, frozen, or few."""

import math

import pytest
import torch
from claims import BF16, Claims, Given, backward, grads, masters, window

from oxizero import torch_backend, utils

claims = Claims()


def memory(engine):
    """Bytes that rest on this rank, by role."""
    return dict(engine._core.memory)


@claims()
def empty_parameters_change_nothing_for_the_others(at):
    three, five, two, none, flat = (3,), (5,), (2,), (0, 8), (0,)
    shapes = (
        [three, five, two],
        [three, flat, five, two],
        [none, flat, three, five, two],
        [three, five, none, flat, two],
        [three, five, two, none, flat],
        [none, three, flat, five, two, none],
    )
    for bucket in (1, None):
        for given in shapes:
            model = Given(**{f"p{index}": torch.ones(shape) for index, shape in enumerate(given)})
            engine = at.start(model, bucket=bucket)
            backward(engine, **dict.fromkeys(dict(model.named_parameters()), 2.0 + at.rank))
            told = utils.safe_get_full_model_grads(engine)
            assert [tuple(grad.shape) for grad in told.values()] == given
            engine.step()
            assert engine.get_global_grad_norm() == math.sqrt(10 * 2.5**2)
            whole = engine.state_dict()
            for shape, (name, param) in zip(given, model.named_parameters(), strict=True):
                weight = whole[name]
                assert tuple(param.shape) == tuple(weight.shape) == shape
                assert weight.equal(torch.full(shape, -1.5)), name


class Twice(torch.nn.Module):
    """y = w x1 + w x2, where the module that has w is called for both."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 1, bias=False)

    def forward(self, *inputs):
        return sum(self.inner(torch.tensor([x], dtype=self.inner.weight.dtype)) for x in inputs)


@claims()
def a_module_that_is_used_twice_sums_its_gradients(at):
    inputs = ((1.0, 2.0), (3.0, 4.0))[at.rank]
    for half in ({}, {"bf16": BF16}):
        engine = at.start(Twice(), bucket=1, **half)
        engine.backward(engine(*inputs).float().sum())
        assert grads(engine) == {"inner.weight": [[5.0]]}
        engine.step()
        for x in inputs:
            engine.backward(engine(x).float().sum())
        assert grads(engine) == {"inner.weight": [[5.0]]}


class Tied(torch.nn.Module):
    """The head's weight is the input's."""

    def __init__(self, width=1):
        super().__init__()
        self.input = torch.nn.Linear(width, 1, bias=False)
        self.head = torch.nn.Linear(width, 1, bias=False)
        self.head.weight = self.input.weight

    def forward(self, x, y):
        dtype = self.head.weight.dtype
        return (self.input(x.to(dtype)) + self.head(y.to(dtype))).float().sum()


@claims()
def a_tied_weight_has_one_gradient_one_norm_and_one_state(at):
    for half in ({}, {"bf16": BF16}):
        model = Tied()
        engine = at.start(model, torch.optim.AdamW(model.parameters()), bucket=1, **half)
        engine.backward(engine(torch.tensor([1.0]), torch.tensor([2.0])))
        whole = utils.safe_get_full_model_grads(engine)
        assert whole["input.weight"].tolist() == whole["head.weight"].tolist() == [[3.0]]
        assert utils.safe_get_full_grad(model.head.weight).item() == 3.0
        engine.step()
        assert engine.get_global_grad_norm() == 3.0
        assert model.head.weight is model.input.weight
        state = engine.state_dict()
        assert state["head.weight"].equal(state["input.weight"])
    model = Tied(64)
    engine = at.start(model, torch.optim.AdamW(model.parameters()))
    moments = 2 * 4 * 64
    assert memory(engine)["optimizer states"] == moments // (1 if at.stage == 0 else 2)


@claims()
def gradients_may_arrive_in_another_order_on_each_rank(at):
    given = {"p0": (1.0, 3.0)[at.rank], "p1": (10.0, 30.0)[at.rank]}
    names = list(given) if at.rank == 0 else list(given)[::-1]
    for bucket in (1, None):
        model, arrived = Given(p0=[0.0], p1=[0.0]), []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(arrived.append)
        engine = at.start(model, bucket=bucket)
        backward(engine, **{name: given[name] for name in names})
        for param, name in zip(arrived, names[::-1], strict=True):
            assert param is getattr(model, name)
        assert grads(engine) == {"p0": [2.0], "p1": [20.0]}


@claims()
def a_parameter_that_a_step_does_not_use_does_not_move(at):
    for half in ({}, {"bf16": BF16}):
        for bucket in (1, None):
            engine = at.start(Given(p=[0.0], q=[0.0]), bucket=bucket, **half)
            window(engine, {"p": 1.0, "q": 1.0})
            backward(engine, q=1.0)
            assert grads(engine) == {"p": [0.0], "q": [1.0]}
            engine.step()
            assert masters(engine) == {"p": [-1.0], "q": [-2.0]}
            assert engine.state_dict()["p"].item() == -1.0


@claims()
def nor_by_its_momentum_or_decay(at):
    model, plain = (Given(p=[1.0], q=[1.0]) for _ in range(2))
    options = {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25}
    engine = at.start(model, torch.optim.SGD(model.parameters(), **options))
    reference = torch.optim.SGD(plain.parameters(), **options)
    for used in ({"p": 1.0, "q": 1.0}, {"q": 1.0}, {"p": 1.0, "q": 1.0}):
        window(engine, used)
        plain(**used).backward()
        reference.step()
        reference.zero_grad()
        expected = {name: param.tolist() for name, param in plain.named_parameters()}
        assert masters(engine) == expected


@claims()
def a_parameter_that_no_rank_uses_does_not_decay(at):
    model, plain = (Given(p=[1.0], q=[1.0]) for _ in range(2))
    options = {"lr": 0.125, "weight_decay": 0.5}
    engine = at.start(model, torch.optim.AdamW(model.parameters(), **options))
    reference = torch.optim.AdamW(plain.parameters(), **options)
    for used in ({"q": 1.0}, {"q": 1.0}, {"p": 1.0, "q": 1.0}):
        window(engine, used)
        plain(**used).backward()
        reference.step()
        reference.zero_grad()
        for name, param in plain.named_parameters():
            assert masters(engine)[name] == pytest.approx(param.tolist(), rel=1e-6), name
        if "p" not in used:
            assert masters(engine)["p"] == [1.0] and engine.state_dict()["p"].item() == 1.0
            for key in ("exp_avg", "exp_avg_sq"):
                assert utils.safe_get_full_optimizer_state(model.p, key).tolist() == [0.0]


@claims()
def one_trained_parameter_of_a_hundred_costs_a_hundredth(at):
    told = []
    for trained in (100, 1):
        model = Given(**{f"p{index}": torch.zeros(64) for index in range(100)})
        for param in list(model.parameters())[trained:]:
            param.requires_grad_(False)
        engine = at.start(model, lambda params: torch.optim.AdamW(params), bf16=BF16)
        told.append(memory(engine))
    every, one = told
    for role in ("gradients", "master weights", "optimizer states"):
        assert 0 < one[role] * 100 == every[role], role


@claims(ranks=4)
def ranks_that_own_nothing_train_along(at):
    for half in ({}, {"bf16": BF16}):
        model = Given(w=[0.0], frozen=[1.0, 2.0])
        model.frozen.requires_grad_(False)
        groups = [{"params": [model.w]}, {"params": [model.frozen], "weight_decay": 0.5}]
        engine = at.start(model, torch.optim.SGD(groups, lr=1.0), **half)
        backward(engine, w=(-1.0, -2.0, -3.0, -6.0)[at.rank], frozen=1.0)
        assert grads(engine) == {"w": [-3.0]}
        engine.step()
        assert engine.get_global_grad_norm() == 3.0
        assert engine.state_dict()["w"].tolist() == [3.0]
        assert engine.state_dict()["frozen"].tolist() == [1.0, 2.0]


@claims()
def ten_parameters_in_buckets_of_five_are_two_reductions_every_step(at):
    names = [f"p{index}" for index in range(10)]
    if at.stage == 3:
        return  # a bucket is a module's
    engine = at.start(Given(**{name: torch.zeros(10) for name in names}), bucket=50)
    assert len(engine._core.buckets) == 2
    if at.back_end == "native":
        return  # what it moves is counted where its collectives are
    with pytest.MonkeyPatch.context() as patch:
        reduced, exchange = [], torch_backend.Group.all_to_all
        patch.setattr(
            torch_backend.Group,
            "all_to_all",
            lambda *given: (reduced.append(1), exchange(*given)),
        )
        for steps in range(1, 4):
            window(engine, dict.fromkeys(names, 1.0))
            assert len(reduced) == 2 * steps


@pytest.mark.parametrize("case", claims.cases())
def test_odd_parameters(case):
    claims.check(case)
