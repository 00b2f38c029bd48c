"""Weights that scripts write between steps: alike on all ranks, or an error that names them."""

import pytest
import torch
from test_torch_backend import Dispatched, HostReads

import oxizero
from oxizero import utils, zero
from oxizero.torch_backend import Device
from oxizero.torch_backend import device as device_module


class Two(torch.nn.Module):
    """Two parameters, whose gradients are ones."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((5,), 4.0, dtype=dtype))
        self.second = torch.nn.Parameter(torch.full((70,), 4.0, dtype=dtype))

    def forward(self):
        return self.first.sum() + self.second.sum()


def start(stage, back_end="native", dtype=torch.float32, model=None):
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        "oxizero": {"backend": back_end},
    }
    model = Two(dtype) if model is None else model
    return oxizero.initialize(model=model, config=config)[0]


def backward(engine):
    engine.backward(engine())


def by_operation(engine, value):
    with torch.no_grad():
        engine.module.second.mul_(value / 4.0)


def by_data(engine, value):
    engine.module.second.data.fill_(value)


def by_loading(engine, value):
    state = engine.state_dict()
    engine.load_state_dict(state | {"second": torch.full_like(state["second"], value)})


WAYS = [by_operation, by_data, by_loading]
SAID = "`second` has other weights on rank 1 than on rank 0: it was not written alike"
# What holds 4, 6, 8 and 16 exactly; the masters of one are the weights, of the other beside them.
DTYPES = [torch.float32, torch.bfloat16]


def unlike(rank, way, stage, back_end, dtype):
    for lone in (None, 0, 1):
        engine = start(stage, back_end, dtype)
        backward(engine)
        if lone is None:
            way(engine, 8.0 * (1 + rank))
        elif rank == lone:
            way(engine, 16.0)
        for _ in range(2):
            with pytest.raises(oxizero.EngineError, match=SAID):
                engine.step()
        by_data(engine, 4.0)  # what both write in place of it counts
        way(engine, 8.0)
        engine.step()
        for param, value in ((engine.module.first, 3.0), (engine.module.second, 7.0)):
            assert param.eq(value).all() and utils.safe_get_full_fp32_param(param).eq(value).all()
        engine.destroy()


@pytest.mark.parametrize("back_end", ["native", "torch"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_not_written_alike_are_named_on_all_ranks(ranks, way, stage, back_end):
    for dtype in DTYPES:
        ranks(2, unlike, way, stage, back_end, dtype)


def alike(rank, way, stage, back_end, dtype):
    engine = start(stage, back_end, dtype)
    for _ in range(4):
        by_data(engine, 4.0)
        way(engine, 8.0)
        with torch.no_grad():
            engine.module.second[3 : 3 + 1] = 16.0
        backward(engine)
        engine.step()
        expected = torch.full((70,), 7.0)
        expected[3] = 15.0
        assert engine.module.second.float().equal(expected)
        assert utils.safe_get_full_fp32_param(engine.module.second).equal(expected)


@pytest.mark.parametrize("back_end", ["native", "torch"])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_written_alike_are_taken_over(ranks, way, stage, back_end):
    for dtype in DTYPES:
        ranks(2, alike, way, stage, back_end, dtype)


def one_bit(rank, stage, back_end):
    engine = start(stage, back_end)
    first, second = engine.module.first, engine.module.second
    for _ in range(3):
        backward(engine)
        engine.step()
    for at in (0, 34, 35, 69):
        backward(engine)
        with torch.no_grad():
            second.fill_(4.0)
            second[at] = 4.0 * (1 + rank * 2**-23)
            if rank == 1:
                first.copy_(first.clone())
        with pytest.raises(oxizero.EngineError, match=SAID):
            engine.step()
        with torch.no_grad():
            second[at] = 4.0
        engine.step()
    backward(engine)
    if rank == 1:
        by_operation(engine, 4.0)
    engine.step()
    assert second.eq(2.0).all() and first.eq(4.0 - 8).all()


@pytest.mark.parametrize("back_end", ["native", "torch"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_bit_is_enough_and_the_same_values_on_one_rank_are_no_difference(
    ranks, stage, back_end
):
    ranks(2, one_bit, stage, back_end)


def unsaid(rank, back_end):
    engine = start(0, back_end)
    for step in range(1, 8):
        backward(engine)
        if step in (3, 5) and rank == 1:
            by_data(engine, 16.0)
        if step == 4:
            with pytest.raises(oxizero.EngineError, match=SAID):
                engine.step()
            by_data(engine, 4.0)
        engine.step()
    backward(engine)
    with pytest.raises(oxizero.EngineError, match=SAID):
        engine.step()


@pytest.mark.parametrize("back_end", ["native", "torch"])
def test_writes_that_torch_does_not_count_are_looked_for_again_and_again(ranks, back_end):
    ranks(2, unsaid, back_end)


def forgotten(rank, stage, folder):
    engine = start(stage)
    by_operation(engine, 8.0 * (1 + rank))
    with pytest.raises(oxizero.EngineError, match=SAID):
        engine.save_checkpoint(folder)
    for _ in range(2):
        backward(engine)
        with pytest.raises(oxizero.EngineError, match=SAID):
            engine.step()
        engine.discard_window()
    utils.safe_set_full_fp32_param(engine.module.second, torch.full((70,), 2.0))
    engine.save_checkpoint(folder)
    backward(engine)
    engine.step()
    assert engine.module.second.eq(1.0).all()
    by_operation(engine, 8.0 * (1 + rank))
    engine.load_checkpoint(folder)
    backward(engine)
    engine.step()
    assert engine.module.second.eq(1.0).all()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_was_not_written_alike_is_neither_saved_nor_forgotten(ranks, stage, tmp_path):
    ranks(2, forgotten, stage, str(tmp_path))


def loaded(rank, back_end, folder):
    engine = start(3, back_end)
    state = engine.state_dict()

    def load(value):
        engine.load_state_dict(state | {"second": torch.full((70,), value)})

    load(8.0 * (1 + rank))
    with pytest.raises(oxizero.EngineError, match=SAID):
        engine.save_checkpoint(folder)
    backward(engine)
    with pytest.raises(oxizero.EngineError, match=SAID):
        engine.step()
    load(8.0)
    engine.step()
    with zero.GatheredParameters(engine.module.second, modifier_rank=1), torch.no_grad():
        assert engine.module.second.eq(7.0).all()
        engine.module.second.fill_(4.0 * rank)
    backward(engine)
    engine.step()
    assert utils.safe_get_full_fp32_param(engine.module.second).eq(3.0).all()
    load(8.0 * (1 + rank))
    utils.safe_set_full_fp32_param(engine.module.second, torch.full((70,), 2.0))
    backward(engine)
    engine.step()
    assert utils.safe_get_full_fp32_param(engine.module.second).eq(1.0).all()


@pytest.mark.parametrize("back_end", ["native", "torch"])
def test_stage_3_names_what_ranks_loaded_unlike(ranks, back_end, tmp_path):
    ranks(2, loaded, back_end, str(tmp_path))


def set_whole(engine, value):
    utils.safe_set_full_fp32_param(engine.module.second, torch.full((70,), value))


def experts(rank, stage, back_end):
    """Ranks 0 and 2 hold one expert, ranks 1 and 3 the other."""
    model = Two()
    oxizero.mark_expert(model.second, [0, 1] if rank < 2 else [2, 3])
    engine = start(stage, back_end, model=model)
    said = "`second` (has|was called with) other (weights|values) on rank 2 than on rank 0"
    for write in (by_data, by_operation, set_whole) if stage < 3 else (set_whole,):
        backward(engine)
        odd = 1.0 if rank == 2 else 0.0
        with pytest.raises(oxizero.EngineError, match=said):
            write(engine, 8.0 * (1 + rank % 2) + odd)
            engine.step()
        by_data(engine, 4.0) if stage < 3 else None
        write(engine, 8.0 * (1 + rank % 2))
        engine.step()
        # The gradient of an expert is the sum over its two ranks, of four micro-batches.
        whole = utils.safe_get_full_fp32_param(model.second)
        assert whole.eq(8.0 * (1 + rank % 2) - 0.5).all()
        backward(engine)
        set_whole(engine, 4.0)
        engine.step()
        set_whole(engine, 4.0)


@pytest.mark.parametrize("back_end", ["native", "torch"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_differ_and_their_copies_do_not(ranks, stage, back_end):
    ranks(4, experts, stage, back_end)


def reads(rank, stage):
    engine = start(stage, "torch")
    for step in range(4):
        backward(engine)
        by_operation(engine, 8.0)
        with HostReads() as functions, Dispatched() as operations:
            engine.step()
        seen = [name for name in functions.seen if name != "untyped_storage"]
        assert seen == ["tolist"] and operations.seen == []


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_that_takes_writes_over_reads_the_device_once(ranks, stage):
    ranks(2, reads, stage)


def test_a_devices_checksum_tells_every_bit_and_the_order(monkeypatch):
    device = Device(torch.device("cpu"))

    def told(values, block=device_module.BLOCK):
        monkeypatch.setattr(device_module, "BLOCK", block)
        flat, name = values.view(torch.uint8), str(values.dtype).removeprefix("torch.")
        sizes, sums = device.measure([], 1.0, None, [(flat, name, 0, values.numel())])
        assert sizes == []
        return sums[0]

    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        for numel in (1, 2, 5, 70):
            values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
            seen = [told(values)]
            assert seen == [told(values.clone(), block=4)]
            for at in range(numel):
                for bit in range(8 * dtype.itemsize):
                    other = values.clone()
                    other.view(bits)[at] ^= (1 << bit) - (1 << 8 * dtype.itemsize) * (
                        bit == 8 * dtype.itemsize - 1
                    )
                    seen.append(told(other))
            seen += [told(values.roll(by)) for by in range(1, numel)]
            assert len(set(seen)) == len(seen)
            assert all(0 <= checksum < 1 << 64 for checksum in seen)
    assert device.measure([], 1.0, None, []) == ([], [])
