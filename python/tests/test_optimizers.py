"""Update rules and optimizers that `initialize` takes, against torch on one process."""

import pytest
import torch
from test_access import Constant
from test_engine import window

import oxizero
from oxizero import utils
from oxizero.ops.adagrad import DeepSpeedCPUAdagrad
from oxizero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from oxizero.ops.lion import DeepSpeedCPULion, FusedLion

OPTIONS = {"lr": 0.1, "weight_decay": 0.1}

# What `initialize` takes, and torch's optimizer with the same arithmetic.
PAIRS = {
    "adagrad": (
        lambda params: torch.optim.Adagrad(
            params, lr_decay=0.1, initial_accumulator_value=0.5, **OPTIONS
        ),
        lambda params: torch.optim.Adagrad(
            params, lr_decay=0.1, initial_accumulator_value=0.5, **OPTIONS
        ),
    ),
    "cpu adagrad": (
        lambda params: DeepSpeedCPUAdagrad(params, **OPTIONS),
        lambda params: torch.optim.Adagrad(params, **OPTIONS),
    ),
    "fused adam": (
        lambda params: FusedAdam(params, **OPTIONS),
        lambda params: torch.optim.AdamW(params, **OPTIONS),
    ),
    "fused adam, coupled": (
        lambda params: FusedAdam(params, adam_w_mode=False, **OPTIONS),
        lambda params: torch.optim.Adam(params, **OPTIONS),
    ),
    "cpu adam": (
        lambda params: DeepSpeedCPUAdam(params, **OPTIONS),
        lambda params: torch.optim.AdamW(params, **OPTIONS),
    ),
    "cpu adam, coupled": (
        lambda params: DeepSpeedCPUAdam(params, adamw_mode=False, **OPTIONS),
        lambda params: torch.optim.Adam(params, **OPTIONS),
    ),
    "fused lion": (
        lambda params: FusedLion(params, betas=(0.9, 0.99), **OPTIONS),
        lambda params: DeepSpeedCPULion(params, betas=(0.9, 0.99), **OPTIONS),
    ),
}


def train(model, step):
    """Six steps by gradients that differ by element; the weights after each."""
    generator = torch.Generator().manual_seed(5)
    seen = []
    for _ in range(6):
        step(torch.randn(4, generator=generator).tolist())
        seen.append(model.weight.detach().clone())
    return torch.stack(seen)


def plain(make):
    model = Constant(4)
    optimizer = make(model.parameters())

    def step(gradient):
        model(gradient).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train(model, step)


def with_engine(make):
    model = Constant(4)
    engine, *_ = oxizero.initialize(model=model, optimizer=make, config={})
    return train(model, lambda gradient: window(engine, gradient))


@pytest.mark.parametrize("name", PAIRS)
def test_the_engine_updates_as_torch_does(name):
    make, reference = PAIRS[name]
    torch.testing.assert_close(with_engine(make), plain(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_an_optimizer_steps_without_an_engine(name):
    make, reference = PAIRS[name]
    torch.testing.assert_close(plain(make), plain(reference), rtol=1e-6, atol=1e-6)


def test_lion_moves_by_the_sign_of_an_average():
    """By hand: directions of 0.75 m + 0.25 g, averages of 0.5 m + 0.5 g; all numbers are exact."""
    params = {"lr": 0.5, "betas": [0.75, 0.5]}
    config = {"optimizer": {"type": "Lion", "params": params}}
    engine, *_ = oxizero.initialize(model=Constant(3), config=config)
    window(engine, [8.0, 0.0, -1.0])
    assert window(engine, [-4.0, 0.0, -2.0]) == [-1.0, 0.0, 1.0]
    average = utils.safe_get_full_optimizer_state(engine.module.weight, "exp_avg")
    assert average.tolist() == [0.0, 0.0, -1.25]


def test_adagrad_starts_from_its_initial_sum():
    params = {"lr": 1.0, "initial_accumulator_value": 9.0}
    config = {"optimizer": {"type": "Adagrad", "params": params}}
    engine, optimizer, *_ = oxizero.initialize(model=Constant(2), config=config)
    assert not optimizer.client.state, "the engine keeps the states"
    state = utils.safe_get_full_optimizer_state(engine.module.weight, "sum")
    assert state.tolist() == [9.0, 9.0]
    assert window(engine, 4.0) == [pytest.approx(-0.8)] * 2


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(2))
        self.second = torch.nn.Parameter(torch.zeros(2))

    def forward(self, factor):
        return (factor * (self.first + self.second)).sum()


def two_groups(*momenta):
    def make(params):
        groups = [
            {"params": [param], "momentum": momentum}
            for param, momentum in zip(params, momenta, strict=True)
        ]
        return torch.optim.SGD(groups, lr=0.5)

    return make


def test_groups_with_and_without_momentum_train_as_torch_does():
    ours, plain = Two(), Two()
    reference = two_groups(0.0, 0.5)(plain.parameters())
    engine, optimizer, *_ = oxizero.initialize(
        model=ours, optimizer=two_groups(0.0, 0.5), config={}
    )
    for step, gradient in enumerate((1.0, 2.0, 4.0, 8.0, 16.0)):
        if step == 3:
            for groups in (optimizer.param_groups, reference.param_groups):
                groups[0]["momentum"], groups[1]["momentum"] = 0.25, 0.0
        engine.backward(engine(gradient))
        engine.step()
        plain(gradient).backward()
        reference.step()
        reference.zero_grad()
        assert ours.first.equal(plain.first) and ours.second.equal(plain.second)


def test_a_momentum_that_comes_later_is_refused_by_group():
    engine, optimizer, *_ = oxizero.initialize(
        model=Two(), optimizer=two_groups(0.0, 0.0), config={}
    )
    optimizer.param_groups[1]["momentum"] = 0.5
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.ConfigError, match=r"param_groups\[1\]\['momentum'\] = 0.5"):
        engine.step()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda params: FusedAdam(params, amsgrad=True), "amsgrad = True is refused"),
        (lambda params: FusedAdam(params, bias_correction=False), "bias_correction = False"),
        (lambda params: DeepSpeedCPUAdam(params, amsgrad=True), "amsgrad = True is refused"),
        (lambda params: DeepSpeedCPULion(params, fp32_optimizer_states=False), "fp32_optimizer"),
        (lambda params: DeepSpeedCPUAdagrad(params, amsgrad=True), "amsgrad = True is refused"),
        (torch.optim.NAdam, "optimizer = NAdam is refused.*FusedLion"),
    ],
)
def test_what_there_is_not_is_refused(make, said):
    with pytest.raises(oxizero.ConfigError, match=said):
        oxizero.initialize(model=Constant(), optimizer=make, config={})


def test_options_that_change_nothing_are_accepted():
    for options in ({"foreach": True}, {"fused": True}, {"capturable": True}):
        engine, *_ = oxizero.initialize(
            model=Constant(1),
            optimizer=lambda params, options=options: torch.optim.AdamW(params, lr=0.5, **options),
            config={},
        )
        assert window(engine, 1.0) == [pytest.approx(-0.5)]


def test_an_optimizer_that_has_stepped_is_refused():
    model = Constant(1)
    client = torch.optim.AdamW(model.parameters())
    model(1.0).backward()
    client.step()
    with pytest.raises(oxizero.ConfigError, match="the optimizer has stepped"):
        oxizero.initialize(model=model, optimizer=client, config={})


def test_what_is_frozen_stays_frozen_or_says_so():
    model = Two()
    model.second.requires_grad_(False)
    engine, *_ = oxizero.initialize(model=model, optimizer=torch.optim.AdamW, config={})
    engine.backward(engine(1.0))
    engine.step()
    assert model.second.tolist() == [0.0, 0.0]
    model.second.requires_grad_(True)
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.EngineError, match="`second` was frozen in initialize"):
        engine.step()


def test_what_is_frozen_later_has_no_gradient():
    model = Two()
    engine, *_ = oxizero.initialize(
        model=model, optimizer=lambda params: torch.optim.SGD(params, lr=1.0), config={}
    )
    model.first.requires_grad_(False)
    engine.backward(engine(1.0))
    engine.step()
    assert (model.first.tolist(), model.second.tolist()) == ([0.0, 0.0], [-1.0, -1.0])
