"""What could go wrong silently, and does not."""

import os

import pytest
import torch
from test_access import Constant, start

import oxizero
from oxizero import utils


def window(engine, *gradients):
    for gradient in gradients:
        engine.backward(engine(gradient))
        engine.step()
    return engine.module.weight.tolist()


SETTERS = {
    "full_grad": utils.safe_set_full_grad,
    "full_param": utils.safe_set_full_fp32_param,
    "full_state": lambda *of: utils.safe_set_full_optimizer_state(*of, "momentum_buffer"),
    "local_grad": utils.safe_set_local_grad,
    "local_param": utils.safe_set_local_fp32_param,
    "local_state": lambda *of: utils.safe_set_local_optimizer_state(*of, "momentum_buffer"),
}


def wrong_on_one(rank, setter, back_end):
    momentum = {"type": "SGD", "params": {"lr": 1.0, "momentum": 0.5}}
    engine = start(Constant(4), 2, optimizer=momentum, oxizero={"backend": back_end})
    weight, write = engine.module.weight, SETTERS[setter]
    engine.backward(engine(1.0))
    local = setter.startswith("local")
    right = torch.ones_like(utils.safe_get_local_fp32_param(weight) if local else weight)
    wrongs = [torch.ones(5), right.detach().double(), [1.0] * 4, torch.eye(2).to_sparse()]
    own = "elements were given|`weight`.*(shape|float32|no dense tensor)"
    told = "refused the call" if rank == 0 else own
    for wrong in wrongs if local else [torch.ones(4, 1), *wrongs]:
        with pytest.raises(oxizero.EngineError, match=told):
            write(weight, right.detach() if rank == 0 else wrong)
    utils.safe_set_full_grad(weight, torch.full((4,), 2.0))
    engine.step()
    assert weight.tolist() == [-2.0] * 4


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("back_end", ["native", "torch"])
def test_values_that_are_wrong_on_one_rank_are_an_error_on_all(ranks, setter, back_end):
    ranks(2, wrong_on_one, setter, back_end)


def test_one_step_too_many_is_an_error():
    engine = start(Constant(1), 1)
    engine.backward(engine(1.0))
    engine.optimizer.step()
    with pytest.raises(oxizero.EngineError, match="optimizer.step.. are the same"):
        engine.step()
    assert window(engine, 1.0) == [-2.0]


def test_a_destroyed_engine_says_so():
    engine = start(Constant(1), 1)
    module = engine.module
    window(engine, 1.0)
    engine.destroy()
    for use in (engine.destroy, engine.step, lambda: engine(1.0), engine.zero_grad,
                lambda: engine.backward(module(1.0)), lambda: engine.clip_grad_norm_(1.0)):
        with pytest.raises(oxizero.EngineError, match="the engine was destroyed"):
            use()
    assert utils.safe_get_full_grad(module.weight) is None
    assert module(2.0).item() == -2.0


def test_what_is_not_there_yet_says_what_is():
    engine = start(Constant(1), 1)
    with pytest.raises(NotImplementedError, match="stays in memory"):
        engine.offload_states()
    with pytest.raises(NotImplementedError, match="nothing can be offloaded"):
        engine.reload_states()


def coalesced(rank, stage):
    engine = start(Constant(1), stage)
    with engine.coalesce_grad_reduction():
        for gradient in (1.0, 2.0, 3.0):
            engine.backward(engine(gradient + rank))
    assert utils.safe_get_full_grad(engine.module.weight).item() == 7.5
    engine.step()
    assert engine.module.weight.item() == -7.5
    assert window(engine, 1.0) == [-8.5]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_coalesced_backwards_are_one_micro_batch(ranks, stage):
    ranks(2, coalesced, stage)


def written_as_data(rank, stage, dtype):
    engine = start(Constant(70, dtype), stage)
    weight = engine.module.weight
    window(engine, 1.0)
    weight.data.fill_(64.0)
    weight.data[5] = 8.0
    window(engine, 1.0)
    expected = torch.full((70,), 63.0)
    expected[5] = 7.0
    assert weight.float().equal(expected)
    assert utils.safe_get_full_fp32_param(weight).equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_that_are_written_as_data_stay_written(ranks, stage, dtype):
    ranks(2, written_as_data, stage, dtype)


def test_memory_of_gradients_serves_again_once_nobody_holds_them():
    engine = start(Constant(1000), 1)

    def read(gradient):
        engine.backward(engine(gradient))
        grads = utils.safe_get_full_model_grads(engine)
        engine.step()
        return grads["weight"]

    first = read(1.0)
    address = first.data_ptr()
    second = read(2.0)
    assert second.data_ptr() != address and first.tolist() == [1.0] * 1000
    part, address = second[3:5], second.data_ptr()
    del second
    assert read(3.0).data_ptr() != address and part.tolist() == [2.0] * 2
    del part
    third = read(4.0)
    address = third.data_ptr()
    assert third.tolist() == [4.0] * 1000
    del third
    assert read(5.0).data_ptr() == address


class Large(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16 << 20))

    def forward(self, gradient):
        return (self.weight[:8] * gradient).sum()


def shared_memory(rank, share):
    engine = start(Large(), 1, oxizero={"share_weights": share})
    engine.backward(engine(1.0 + rank))
    engine.step()
    assert engine.module.weight[:9].tolist() == [-1.5] * 8 + [0.0]
    # Everything is touched; a page counts with each process as its part of those that map it.
    engine.module.weight.sum()
    torch.nn.functional.relu(torch.zeros(1))
    core = engine._core
    core.barrier()
    with open(f"/proc/{os.getpid()}/smaps_rollup", encoding="ascii") as file:
        (line,) = [line for line in file if line.startswith("Pss:")]
    core.barrier()
    return int(line.split()[1]) << 10


def test_shared_weights_lie_in_memory_once(ranks):
    apart, together = (sum(ranks(2, shared_memory, share)) for share in (False, True))
    weights = 4 * (16 << 20)
    assert apart - together == pytest.approx(weights, rel=0.1)


def shared(rank, stage, dtype):
    engine = start(Constant(8, dtype), stage, oxizero={"share_weights": True})
    assert engine._core.shares_weights
    weight = engine.module.weight
    assert window(engine, 1.0 + rank, 2.0) == [-3.5] * 8
    utils.safe_set_full_fp32_param(weight, torch.full((8,), 4.0))
    assert window(engine, 1.0) == [3.0] * 8
    with oxizero.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        if rank == 1:
            weight.mul_(2.0)
    assert weight.tolist() == [6.0] * 8
    assert utils.safe_get_full_fp32_param(weight).tolist() == [6.0] * 8
    assert window(engine, 1.0) == [5.0] * 8
    with torch.no_grad():
        assert engine(1.0).item() == 40.0
        engine._core.barrier()
        weight.mul_(1.0)
    with pytest.raises(oxizero.EngineError, match="`weight` was written, and all ranks"):
        engine(1.0)
    engine._core.barrier()  # nobody leaves before the others have looked
    address = weight.data_ptr()
    engine.destroy()
    assert weight.data_ptr() != address and weight.tolist() == [5.0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_shared_weights_are_read_and_not_written(ranks, stage, dtype):
    ranks(2, shared, stage, dtype)
