"""Whole and local gradients, master weights and optimizer states."""

import pytest
import torch
from models import Gpt, build

import oxizero
from oxizero import utils


class Constant(torch.nn.Module):
    """The gradient of its one parameter is what it is called with."""

    def __init__(self, numel=5, dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, gradient):
        return (self.weight * torch.tensor(gradient, dtype=self.weight.dtype)).sum()


def start(model, stage, **config):
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    config = {"zero_optimization": {"stage": stage}, "optimizer": sgd} | config
    return oxizero.initialize(model=model, config=config)[0]


def mean_of_bf16(rank, stage, wire):
    engine = start(
        Constant(dtype=torch.bfloat16), stage, bf16={"enabled": True}, communication_data_type=wire
    )
    engine.backward(engine((1.0, 1.0078125)[rank]))
    grad = utils.safe_get_full_grad(engine.module.weight)
    assert grad.dtype == torch.float32
    return grad.tolist()


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_mean_is_not_rounded_to_the_dtype_that_travels(ranks, stage, wire):
    assert ranks(2, mean_of_bf16, stage, wire) == [[1.00390625] * 5] * 2


def read_and_write(rank, stage):
    engine = start(Constant(), stage, gradient_accumulation_steps=2)
    weight = engine.module.weight
    with pytest.raises(oxizero.EngineError, match="not ready"):
        utils.safe_get_full_grad(weight)
    engine.backward(engine(1.0 + rank))
    engine.step()
    with pytest.raises(oxizero.EngineError, match="1 of 2 micro-batches"):
        utils.safe_get_full_grad(weight)
    engine.backward(engine(3.0 + rank))
    assert utils.safe_get_full_grad(weight).tolist() == [2.5] * 5
    local = utils.safe_get_local_grad(weight)
    utils.safe_set_local_grad(weight, local * 4)
    assert utils.safe_get_full_grad(weight).tolist() == [10.0] * 5
    new = torch.arange(5.0)
    utils.safe_set_full_grad(weight, new)
    assert utils.safe_get_full_grad(weight).equal(new)
    assert utils.safe_get_full_grad(torch.nn.Parameter(torch.ones(2))) is None
    utils.safe_set_full_grad(torch.nn.Parameter(torch.ones(2)), torch.ones(2))
    engine.step()
    assert weight.equal(-new)
    with pytest.raises(oxizero.EngineError, match="consumed by the last step"):
        utils.safe_get_full_grad(weight)
    for wrong in (torch.ones(7), torch.ones(5, 1)):
        with pytest.raises(oxizero.EngineError, match="shape"):
            utils.safe_set_full_fp32_param(weight, wrong)
    with pytest.raises(oxizero.EngineError):
        utils.safe_set_local_fp32_param(weight, torch.ones(7))
    utils.safe_set_full_fp32_param(weight, new.double().float() + 1)
    assert weight.equal(new + 1)
    assert utils.safe_get_full_fp32_param(weight).equal(new + 1)
    utils.safe_set_local_fp32_param(weight, utils.safe_get_local_fp32_param(weight) * 2)
    assert weight.equal(2 * (new + 1))
    return local.numel()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_and_masters_are_read_and_written_at_their_time(ranks, stage):
    owned = ranks(2, read_and_write, stage)
    assert owned == [5, 5] if stage == 0 else sum(owned) == 5


def states(rank, stage):
    model = Constant()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    config = {"zero_optimization": {"stage": stage}}
    engine, _, _, _ = oxizero.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(2.0))
    engine.step()
    weight = model.weight
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg").tolist() == [
        pytest.approx(0.2, rel=1e-6)
    ] * 5
    new = torch.arange(5.0)
    utils.safe_set_full_optimizer_state(weight, new, "exp_avg_sq")
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg_sq").equal(new)
    local = utils.safe_get_local_optimizer_state(weight, "exp_avg_sq")
    utils.safe_set_local_optimizer_state(weight, local + 1, "exp_avg_sq")
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg_sq").equal(new + 1)
    with pytest.raises(oxizero.EngineError, match="it keeps: exp_avg, exp_avg_sq"):
        utils.safe_get_full_optimizer_state(weight, "momentum")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_optimizer_states_have_torchs_names(ranks, stage):
    ranks(2, states, stage)


def model_grads(rank, stage):
    model = build(Gpt)
    model.project.bias.requires_grad_(False)
    engine = start(model, stage)
    generator = torch.Generator().manual_seed(rank)
    engine.backward(engine(Gpt.batch(generator)))
    grads = utils.safe_get_full_model_grads(model)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert grads.keys() == names - {"project.bias"}
    assert grads["head.weight"].equal(grads["embedding.weight"])
    assert utils.safe_get_full_grad(model.project.bias) is None
    for name, param in model.named_parameters():
        if param.requires_grad:
            one = utils.safe_get_full_grad(param)
            assert one.shape == param.shape and one.equal(grads[name])
    assert utils.safe_get_full_model_grads(engine).keys() == grads.keys()
    assert utils.safe_get_full_model_grads(torch.nn.Linear(2, 2)) == {}
    kept = grads["up.weight"]
    before = kept.clone()
    del grads
    engine.step()
    kept.mul_(2)
    assert kept.equal(2 * before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_models_gradients_come_by_name_and_outlive_the_step(ranks, stage):
    ranks(2, model_grads, stage)
