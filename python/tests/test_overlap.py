"""Operations on a thread of their own, on the back end of torch: the same bits, in an order that
holds where a device does its work later.

There is no such device here. A stand-in for torch's module of one notes on which stream each access
to memory is asked for, and what events order: two accesses of which one writes are to be ordered,
or a device may do them in either order.
"""

import os
import gc
import threading
import time
import weakref

import pytest
import torch
from models import Gpt, build
from running import OXIZERO, succeed
from test_access import Constant, start

import oxizero
from oxizero import torch_backend, utils
from oxizero.torch_backend import Device, Group, Streams, streams


def trained(rank, stage, dtype, overlap):
    """The master weights after some windows, and what ranks read of gradients."""
    model = build(Gpt)
    zero = {"stage": stage, "reduce_bucket_size": 500, "overlap_comm": overlap}
    config = {
        "oxizero": {"backend": "torch"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": zero,
    }
    engine, *_ = oxizero.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(rank)
    for window in range(3):
        for micro_batch in range(2):
            engine.backward(engine(Gpt.batch(generator)))
            if (window, micro_batch) == (1, 1):
                grads = utils.safe_get_full_model_grads(engine)
            engine.step()
    masters = [utils.safe_get_full_fp32_param(param) for param in model.parameters()]
    engine.destroy()
    return [*masters, *grads.values(), *(param.detach().float() for param in model.parameters())]


def both(rank, stage, dtype):
    for without, beside in zip(
        trained(rank, stage, dtype, False), trained(rank, stage, dtype, True), strict=True
    ):
        assert without.equal(beside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_changes_no_bit(ranks, stage, dtype):
    ranks(3, both, stage, dtype)


class Stream:
    """What a stream has been asked for, as times: by stream, up to which of its accesses."""

    def __init__(self, device=None):
        self.times = {self: 0}

    def wait_event(self, event):
        for stream, time_there in event.times.items():
            self.times[stream] = max(self.times.get(stream, 0), time_there)


class Event:
    def record(self, stream):
        self.times = dict(stream.times)


class Later:
    """torch's module of a device that does its work later, and who accesses its memory."""

    Stream, Event = Stream, Event

    def __init__(self):
        # By the system's threads, as torch's: Python's own idea of one ends with each call.
        self._caller, self._own = Stream(), {}
        self._lock = threading.Lock()
        # By storage: stream, time, bytes, and whether it writes.
        self._accesses = {}
        self.unordered, self.beside, self.freed = [], 0, 0

    def set_stream(self, stream):
        self._own[threading.get_ident()] = stream

    def current_stream(self, device=None):
        return self._own.get(threading.get_ident(), self._caller)

    def access(self, memory, start, end, writes, what):
        """An access is after all that it must not be mixed with."""
        with self._lock:
            stream = self.current_stream()
            self.beside += stream is not self._caller
            stream.times[stream] += 1
            storage = memory.untyped_storage()
            seen = self._accesses.setdefault(storage._cdata, [])
            if not seen:
                weakref.finalize(storage, self._accesses.pop, storage._cdata, None)
            for other, at, first, last, wrote, named in seen:
                meets = first < end and start < last and (writes or wrote)
                if meets and stream.times.get(other, 0) < at:
                    self.unordered.append((what, named))
            seen.append((stream, stream.times[stream], start, end, writes, what))

    def let_go(self, tensor):
        """Memory goes back to its stream, which all work on it is before."""
        with self._lock:
            self.freed += 1
            stream = self.current_stream()
            for other, at, *_, named in self._accesses.pop(tensor.untyped_storage()._cdata, []):
                if stream.times.get(other, 0) < at:
                    self.unordered.append(("freed", named))


def watch(monkeypatch):
    """Has all operations on the engine's memory noted, as on a device that does them later."""
    later = Later()
    monkeypatch.setattr(streams, "of", lambda device: Streams(device, later))
    monkeypatch.setattr(Streams, "let_go", lambda self, tensor: later.let_go(tensor))

    def noted(kind, name, reads, writes):
        original = getattr(kind, name)

        def call(self, *args):
            for places, is_write in ((reads, False), (writes, True)):
                for at in places(*args):
                    if at is not None:
                        memory, dtype, start, end = at
                        size = getattr(torch, dtype).itemsize
                        later.access(memory, start * size, end * size, is_write, name)
            return original(self, *args)

        monkeypatch.setattr(kind, name, call)

    def none(*_):
        return ()

    noted(Device, "fill", none, lambda target, _: [target])
    noted(Device, "cast", lambda source, _: [source], lambda _, target: [target])
    noted(Device, "adopt", lambda source, _: [source], lambda _, target: [target])
    noted(Device, "tree_sum", lambda inputs, *_: inputs, lambda _, target, adds: [target])
    noted(Device, "divide", none, lambda grad, _: [grad])
    noted(Device, "measure", lambda grads, *_: grads, none)
    noted(Group, "all_to_all", lambda source, *_: [source], lambda _, __, target: [target])
    noted(Group, "all_gather", lambda shard, _: [shard], lambda _, full: [full])
    noted(Group, "broadcast", none, lambda buffer, _: [buffer])
    update = torch_backend.update

    def updated(group, hyper, scaled, weights):
        master, states, model = weights
        for memory, dtype, start, end in (scaled[0], master, *states, *([model] if model else [])):
            size = getattr(torch, dtype).itemsize
            later.access(memory, start * size, end * size, True, "update")
        update(group, hyper, scaled, weights)

    monkeypatch.setattr(torch_backend, "update", updated)

    def read_by_the_model(module, _):
        for param in module.parameters(recurse=False):
            start = param.storage_offset() * param.element_size()
            end = start + param.numel() * param.element_size()
            later.access(param, start, end, False, "forward")

    torch.nn.modules.module.register_module_forward_pre_hook(read_by_the_model)
    return later


def ordered(rank, stage, dtype, faulty):
    monkeypatch = pytest.MonkeyPatch()  # of a rank that ends
    later = watch(monkeypatch)
    if faulty:
        monkeypatch.setattr(Streams, faulty, lambda *_: None)
    trained(rank, stage, dtype, True)
    assert later.beside > 50 and later.freed > 10
    assert bool(later.unordered) == bool(faulty), later.unordered[:10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_device_that_works_later_is_told_every_order(ranks, stage, dtype):
    ranks(2, ordered, stage, dtype, None)


def test_an_order_that_is_missing_would_be_seen(ranks):
    ranks(2, ordered, 2, torch.bfloat16, "wait")


def beside(model, stage):
    zero = {"stage": stage, "overlap_comm": True}
    return start(model, stage, oxizero={"backend": "torch"}, zero_optimization=zero)


def fails_beside(rank):
    engine = beside(Constant(4096), 2)
    if rank == 1:
        def fails(*_):
            raise torch.OutOfMemoryError("no memory")

        Device.tree_sum = fails
    started = time.monotonic()
    with pytest.raises(torch.OutOfMemoryError if rank == 1 else oxizero.CommError) as raised:
        engine.backward(engine(1.0))
        engine.step()
    assert time.monotonic() - started < 20
    with pytest.raises(oxizero.EngineError):
        engine.step()
    return str(raised.value)


def test_an_operation_that_fails_beside_is_the_callers_exception_and_told_to_the_others(ranks):
    first, second = ranks(2, fails_beside)
    assert second == "no memory"
    assert "rank 1 gave up: OutOfMemoryError: no memory" in first


def dropped(rank):
    """With weights on their way."""
    engine = beside(build(Gpt), 1)
    engine.backward(engine(Gpt.batch(torch.Generator().manual_seed(rank))))
    engine.step()
    module = weakref.ref(engine.module)
    if rank == 1:
        time.sleep(0.5)
    del engine
    gc.collect()
    assert module() is None


def test_an_engine_that_is_dropped_waits_without_the_interpreters_lock(ranks):
    ranks(2, dropped)


SCRIPT = """
import torch
import oxizero

model = torch.nn.Linear(300, 300)
adamw = {"type": "AdamW", "params": {"lr": 0.1}}
zero = {"stage": 2, "overlap_comm": True}
config = {"optimizer": adamw, "zero_optimization": zero, "oxizero": {"backend": "torch"}}
engine, *_ = oxizero.initialize(model=model, config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 300)).sum())
    engine.step()
print("ended")
"""


def test_a_script_ends_while_weights_are_on_their_way(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for _ in range(3):
        told = succeed([*OXIZERO, "launch", "-n", 2, script])
        assert told.count("ended") == 2
