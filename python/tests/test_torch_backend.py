"""The back end of torch, forced on the CPU: the path that other devices take."""

import datetime
import os
import time

import pytest
import torch
from models import Gpt, build
from test_access import Constant, start
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import oxizero
from oxizero import utils
from oxizero.torch_backend import Device, Group

TORCH = {"backend": "torch"}
RULES = {
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "Adam": {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False},
    "SGD": {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    "Lion": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "weight_decay": 0.1},
}
# What they keep.
KEPT = {
    "AdamW": ["exp_avg", "exp_avg_sq"],
    "Adam": ["exp_avg", "exp_avg_sq"],
    "SGD": ["momentum_buffer"],
    "Lion": ["exp_avg"],
    "Adagrad": ["sum"],
}


def trained(rank, back_end, stage, rule, dtype):
    """The weights and master weights after some windows."""
    model = build(Gpt)
    optimizer = {"type": rule, "params": RULES[rule]}
    config = {
        "oxizero": {"backend": back_end},
        "optimizer": optimizer,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500},
    }
    engine, *_ = oxizero.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        engine.backward(engine(Gpt.batch(generator)))
        engine.step()
    return [utils.safe_get_full_fp32_param(param) for param in model.parameters()]


def both(rank, *setting):
    for native, torchs in zip(
        trained(rank, "native", *setting), trained(rank, "torch", *setting), strict=True
    ):
        assert native.equal(torchs)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_updates_to_the_bits_of_the_native_one(rule):
    for dtype in (torch.float32, torch.bfloat16):
        both(0, 2, rule, dtype)


ODD = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, -1e-39, 1e-38, 1e-30, 3e38, 1.0]


def updated(back_end, rule):
    """The weights and states after updates with gradients at the ends of what a dtype holds."""
    config = {
        "optimizer": {"type": rule, "params": RULES[rule]},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "oxizero": {"backend": back_end},
    }
    engine = start(Constant(len(ODD), torch.bfloat16), 1, **config)
    weight, after = engine.module.weight, []
    for gradient in (ODD, ODD[::-1], [1.0] * len(ODD)):
        engine.backward(engine(gradient))
        engine.step()
        after.append(utils.safe_get_full_fp32_param(weight))
        for key in KEPT[rule]:
            after.append(utils.safe_get_full_optimizer_state(weight, key))
    assert engine.skipped_steps == 0 and after[0].isnan().any()
    return after


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_takes_odd_gradients_as_the_native_one_does(rule):
    for native, torchs in zip(updated("native", rule), updated("torch", rule), strict=True):
        torch.testing.assert_close(torchs, native, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_train_to_the_bits_of_the_native_back_end(ranks, stage, dtype):
    ranks(3, both, stage, "AdamW", dtype)


def mean_of_bf16(rank, stage, wire):
    engine = start(
        Constant(dtype=torch.bfloat16),
        stage,
        bf16={"enabled": True},
        communication_data_type=wire,
        oxizero=TORCH,
    )
    engine.backward(engine((1.0, 1.0078125)[rank]))
    return utils.safe_get_full_grad(engine.module.weight).tolist()


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_a_mean_is_not_rounded_to_the_dtype_that_travels(ranks, wire):
    for stage in (0, 2):
        assert ranks(2, mean_of_bf16, stage, wire) == [[1.00390625] * 5] * 2


class HostReads(TorchFunctionMode):
    """Notes by name what makes numbers or memory of the host's from a tensor."""

    NAMES = {
        "tolist", "item", "numpy", "__array__", "__dlpack__", "to_dlpack", "cpu", "__bool__",
        "__float__", "__int__", "__index__", "is_nonzero", "equal", "allclose", "untyped_storage",
    }

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.NAMES:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """Notes what ends in a number of the host's, and the sizes of what is copied to its memory."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"):
            self.seen.append(name)
        device = (kwargs or {}).get("device")
        if name == "aten::_to_copy" and device is not None:
            self.seen.append(f"{name} to {device}")
        return function(*args, **(kwargs or {}))


def reads_of_a_step(rank, stage):
    model = build(Gpt)
    adamw = {"type": "AdamW", "params": {"lr": 0.1}}
    zero = {"stage": stage, "reduce_bucket_size": 500}
    config = {
        "oxizero": TORCH,
        "optimizer": adamw,
        "zero_optimization": zero,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
    }
    engine, *_ = oxizero.initialize(model=model, config=config)
    batch = Gpt.batch(torch.Generator().manual_seed(rank))
    for _ in range(2):
        loss = engine(batch)
        # The engine's own: in stage 3 it looks whose memory a tensor lies in, which reads nothing.
        with HostReads() as functions, Dispatched() as operations:
            engine.backward(loss)
            utils.safe_get_full_model_grads(engine)
            backward = [name for name in functions.seen if name != "untyped_storage"]
            # Autograd's own casts name the device that the tensors are on.
            copies = {"aten::_to_copy to cpu"}
            assert backward == [] and set(operations.seen) <= copies
            operations.seen.clear()
            engine.step()
        step = [name for name in functions.seen if name != "untyped_storage"]
        assert step == ["tolist"], "the verdict is the one read"
        assert operations.seen == []
    assert engine.get_global_grad_norm() > 0.5


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_reads_the_device_once(ranks, stage):
    ranks(2, reads_of_a_step, stage)


def test_a_read_would_be_seen():
    with HostReads() as functions, Dispatched() as operations:
        torch.ones(3).tolist()
        torch.ones(()).item()
        torch.ones(3).double().to("cpu", torch.float32)
    assert functions.seen == ["tolist", "item"]
    assert operations.seen == ["aten::_local_scalar_dense", "aten::_to_copy to cpu"]


def piecewise(rank, size):
    """What a sum of a large bucket takes of its parts at a time."""
    oxizero.init_distributed("gloo")
    group = Group(rank, range(size), torch.device("cpu"), datetime.timedelta(seconds=60))
    source, own = torch.arange(4.0 * size) + 100 * rank, torch.full((4 * size,), -1.0)
    bytes_of = (source.view(torch.uint8), "float32", 0, 4 * size)
    for start, end in ((0, 2), (2, 3), (3, 4), (0, 4)):
        numel = size * (end - start)
        with Dispatched() as operations:
            group.all_to_all(bytes_of, (start, end), (own.view(torch.uint8), "float32", 0, numel))
        assert operations.seen == []
        first = torch.arange(start, end) + 4.0 * rank
        assert own[:numel].equal(torch.cat([first + 100 * other for other in range(size)]))
    group.close()


def test_parts_are_exchanged_a_piece_at_a_time(ranks):
    ranks(3, piecewise, 3)


def test_neighbours_are_measured_as_each_by_itself():
    generator = torch.Generator().manual_seed(5)
    memory = torch.randn(100, generator=generator).view(torch.uint8)
    other = torch.full((8,), float("nan")).bfloat16().view(torch.uint8)
    ends = [(0, 3), (3, 40), (40, 41), (48, 50), (50, 100)]
    grads = [(memory, "float32", *end) for end in ends] + [(other, "bfloat16", 0, 8)]
    device = Device(torch.device("cpu"))
    for power in (1, 2, 3, None):
        together, _ = device.measure(grads, 3.0, power, [])
        alone = [size for grad in grads for size in device.measure([grad], 3.0, power, [])[0]]
        torch.testing.assert_close(together, alone, rtol=1e-15, atol=0, equal_nan=True)


def test_small_parameters_are_updated_and_measured_in_few_operations():
    """As many as of one parameter, were it not for a sum each."""

    def operations(count):
        weights = [torch.nn.Parameter(torch.zeros(64)) for _ in range(count)]
        model = torch.nn.ParameterList(weights)
        adamw = {"type": "AdamW", "params": {"lr": 0.1}}
        engine = start(model, 1, optimizer=adamw, gradient_clipping=0.5, oxizero=TORCH)
        engine.backward(sum(weight.sum() for weight in weights))
        seen = []

        class Counted(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function.name() not in ("aten::sum", "aten::stack", "aten::split_with_sizes"):
                    seen.append(function.name())
                return function(*args, **(kwargs or {}))

        with Counted():
            engine.step()
        return len(seen)

    assert operations(100) <= operations(2) + 2


def dies(rank):
    engine = start(Constant(1), 1, oxizero=TORCH)
    if rank == 1:
        os._exit(0)
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.CommError, match="rank 1 ended"):
        engine.step()
    with pytest.raises(oxizero.CommError, match="rank 1 ended"):
        engine.step()


@pytest.mark.parametrize("size", [2, 4])
def test_a_dead_rank_is_an_exception_on_the_others(ranks, size):
    ranks(size, dies)


def differs(rank):
    engine = start(Constant(4), 1, oxizero=TORCH)
    weight = engine.module.weight
    engine.backward(engine(1.0))
    if rank == 0:
        with pytest.raises(oxizero.CommError, match="rank 0 asks for exchange.*rank 1 for barrier"):
            utils.safe_get_full_grad(weight)
    else:
        with pytest.raises(oxizero.CommError, match="rank 1 asks for barrier.*rank 0 for exchange"):
            engine._core.barrier()


def test_ranks_that_call_different_things_are_told_both(ranks):
    ranks(2, differs)


def late(rank):
    oxizero.init_distributed("native", timeout=datetime.timedelta(seconds=1))
    engine = start(Constant(4), 1, oxizero=TORCH)
    engine.backward(engine(1.0))
    if rank == 1:
        time.sleep(5)
        os._exit(0)
    with pytest.raises(oxizero.CommError, match="rank 1 let rank 0 wait for more than 1s"):
        engine.step()


def test_a_rank_that_does_not_come_is_named(ranks):
    ranks(2, late)


def test_an_operation_that_fails_is_its_own_exception_and_ends_the_engine(monkeypatch):
    engine = start(Constant(4), 1, oxizero=TORCH)
    engine.backward(engine(1.0))
    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Device, "measure", fails)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        engine.step()
    with pytest.raises(oxizero.EngineError, match="the engine is lost"):
        engine.zero_grad()


def test_a_panic_ends_the_engine_too_with_its_reason(monkeypatch):
    engine = start(Constant(4), 1, oxizero=TORCH)
    engine.backward(engine(1.0))
    monkeypatch.setattr(Device, "read", lambda *_: b"too little")
    monkeypatch.setattr(Device, "measure", lambda *_: [1.0, True, "none of this"])
    for _ in range(2):
        with pytest.raises(BaseException) as raised:
            engine.step()
        if isinstance(raised.value, oxizero.EngineError):
            break
    assert "the engine is lost" in str(raised.value)
    with pytest.raises(oxizero.EngineError, match="the engine is lost.*in the middle"):
        engine.zero_grad()


def fails_on_one(rank, operation, in_parts):
    oxizero.init_distributed("native", timeout=datetime.timedelta(seconds=60))
    model = Constant(4096)
    if in_parts:
        oxizero.mark_split(model.weight, 0, [0, 1] if rank < 2 else [2, 3])
    engine = start(model, 1, oxizero=TORCH)
    if rank == 1:
        def fails(*_):
            raise torch.OutOfMemoryError("no memory")

        setattr(Device, operation, fails)
    started = time.monotonic()
    with pytest.raises(torch.OutOfMemoryError if rank == 1 else oxizero.CommError) as raised:
        engine.backward(engine(1.0))
        engine.step()
    assert time.monotonic() - started < 20
    return str(raised.value)


@pytest.mark.parametrize("operation", ["cast", "tree_sum", "measure"])
@pytest.mark.parametrize("in_parts", [False, True], ids=["whole", "in_parts"])
def test_an_operation_that_fails_on_one_rank_is_told_to_the_others(ranks, operation, in_parts):
    first, second, *others = ranks(4 if in_parts else 2, fails_on_one, operation, in_parts)
    assert second == "no memory"
    for told in (first, *others):
        assert "rank 1 gave up: OutOfMemoryError: no memory" in told


def test_weights_are_views_of_one_tensor_and_outlive_the_engine():
    model = build(Gpt)
    engine = start(model, 1, oxizero=TORCH)
    storages = {param.untyped_storage()._cdata for param in model.parameters()}
    assert len(storages) == 1
    before = model.up.weight.detach().clone()
    engine.destroy()
    del engine
    assert model.up.weight.equal(before)


def test_fp16_scales_losses_and_skips_overflows():
    scaling = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = start(Constant(2), 1, fp16=scaling, oxizero=TORCH)
    engine.backward(engine(2.0))
    engine.step()
    engine.backward(engine(60000.0))
    engine.step()
    assert (engine.skipped_steps, engine.loss_scale) == (1, 8.0)
    assert engine.module.weight.tolist() == [-2.0] * 2


def test_the_back_end_is_chosen_by_name_and_by_device(monkeypatch):
    assert start(Constant(1), 0)._back_end.name == "native"
    assert start(Constant(1), 0, oxizero=TORCH)._back_end.name == "torch"
    monkeypatch.setenv("OXIZERO_BACKEND", "torch")
    assert start(Constant(1), 0)._back_end.name == "torch"
    with pytest.raises(oxizero.ConfigError, match='OXIZERO_BACKEND.*"native"'):
        start(Constant(1), 0, oxizero={"backend": "native"})
    monkeypatch.setenv("OXIZERO_BACKEND", "cuda")
    with pytest.raises(oxizero.ConfigError, match="there are native and torch"):
        start(Constant(1), 0)


def test_a_model_on_several_devices_is_refused_by_parameter():
    model = torch.nn.ParameterDict({"a": torch.zeros(1), "b": torch.zeros(1, device="meta")})
    with pytest.raises(oxizero.ConfigError, match="`a` is on cpu and `b` on meta"):
        start(model, 0)
    with pytest.raises(oxizero.ConfigError, match="`weight` is on the meta device"):
        start(Constant(1).to("meta"), 0)
