"""What a checkpoint has beside weights comes back as it was, or is refused before anything is
saved or loaded."""

import collections
import json
import math
import threading
import time

import pytest
import torch
from mishaps import made, train
from torch import nn
from torch.optim import lr_scheduler as schedulers

import oxizero
from oxizero import lr_schedules
from oxizero.encoding import decoded, encoded

PLAIN = {
    1: (2, 3),
    "best": math.inf,
    "worst": -math.inf,
    "$": {"$": "tuple", "of": [1]},
    None: [True, False, None, 0, 1, 1.0, -0.0, 0.1, 5e-324, 1 << 70, -(1 << 70), "\u2026\0"],
    (1, ("a", 2.5)): {True: {}, 2.0: []},
    "count": collections.Counter({3: 2}),
    "nested": [[[({"a": ((),)},)]]],
}


def same(one, other):
    """Equal, and of the same types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = list(zip(sorted(one.items(), key=repr), sorted(other.items(), key=repr)))
        return len(one) == len(other) and all(same(*pair) for pair in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other))
    return repr(one) == repr(other)


def test_a_client_state_comes_back_equal(tmp_path):
    state = PLAIN | {"nan": math.nan}
    made().save_checkpoint(tmp_path, client_state=state)
    assert same(made().load_checkpoint(tmp_path)[1], state)


@pytest.mark.parametrize("value", [PLAIN, [], (), 1, "a", None, {"a": {1: 2}}, {0: {"$": 1}}])
def test_what_is_encoded_is_json_of_which_it_is_read(value):
    text = json.dumps(encoded(value, "it"), allow_nan=False)
    assert same(decoded(json.loads(text)), value)


@pytest.mark.parametrize(
    "text", ['{"$": 1}', '{"$": "no", "of": 1}', '{"$": "tuple"}', '{"$": "int", "of": "x"}',
             '{"$": "dict", "of": [1]}', '{"$": "dict", "of": [[[], 1]]}',
             '{"$": "tensor", "of": ["load", 1]}', '{"$": [], "of": 1}']
)
def test_what_was_not_encoded_is_refused(text):
    with pytest.raises(oxizero.EngineError, match="not what was saved"):
        decoded(json.loads(text))


CIRCLE = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"best": torch.ones(1)}, r'client_state\["best"\] is `Tensor`.*torch.save'),
        ({"a": [0, {2: object()}]}, r'client_state\["a"\]\[1\]\[2\] is `object`'),
        ({"a": {1}}, r'client_state\["a"\] is `set`'),
        ({"f": print}, r'client_state\["f"\]'),
        ({b"k": 1}, "a key of client_state is `bytes`"),
        ({"a": "\ud800"}, r'client_state\["a"\] is a text that is no Unicode'),
        ({"a": CIRCLE}, "holds itself"),
    ],
)
def test_what_a_client_state_cannot_hold_is_named(tmp_path, state, said):
    engine = made()
    with pytest.raises(oxizero.EngineError, match=said):
        engine.save_checkpoint(tmp_path, client_state=state)
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path, client_state={"a": [[]] * 3})


def deep(levels, make):
    value = 0
    for _ in range(levels):
        value = make(value)
    return value


@pytest.mark.parametrize("make", [lambda of: [of], lambda of: (of,), lambda of: {1: of}])
def test_what_is_saved_is_loaded_however_deep(tmp_path, make):
    engine, deepest = made(), 0
    for levels in range(1, 110):
        try:
            engine.save_checkpoint(tmp_path, client_state={"a": deep(levels, make)})
        except oxizero.EngineError as error:
            assert "too deep" in str(error)
            break
        deepest = levels
    assert 30 <= deepest < 105
    assert engine.load_checkpoint(tmp_path)[1] == {"a": deep(deepest, make)}


class Slower:
    """A function with a state."""

    def __init__(self):
        self.calls = {}

    def __call__(self, epoch):
        self.calls[epoch] = self.calls.get(epoch, 0) + 1
        return 0.9 ** len(self.calls)


class Own(schedulers.LRScheduler):
    """A scheduler of a script's own, whose state has functions."""

    def __init__(self, optimizer):
        self.table, self.function = {0: 1.0, 2: 0.5, 5: 0.25}, lambda lr, by: lr * by
        super().__init__(optimizer)

    def get_lr(self):
        return [self.function(group["lr"], self.table.get(self.last_epoch, 1.0))
                for group in self.optimizer.param_groups]


def chain(optimizer):
    first = schedulers.ConstantLR(optimizer, 0.5, 3)
    return schedulers.ChainedScheduler([first, schedulers.ExponentialLR(optimizer, 0.9)])


def sequence(optimizer):
    inner = [schedulers.ConstantLR(optimizer, 0.1, 2), schedulers.MultiStepLR(optimizer, [1, 3])]
    return schedulers.SequentialLR(optimizer, inner, [3])


OF_TORCH = {
    "lambda": lambda of: schedulers.LambdaLR(of, lambda epoch: 0.9**epoch),
    "callable": lambda of: schedulers.LambdaLR(of, Slower()),
    "multiplicative": lambda of: schedulers.MultiplicativeLR(of, lambda epoch: 0.9),
    "step": lambda of: schedulers.StepLR(of, 2),
    "milestones": lambda of: schedulers.MultiStepLR(of, [2, 5, 5, 6]),
    "constant": lambda of: schedulers.ConstantLR(of, 0.5, 5),
    "linear": lambda of: schedulers.LinearLR(of),
    "exponential": lambda of: schedulers.ExponentialLR(of, 0.9),
    "sequence": sequence,
    "cosine": lambda of: schedulers.CosineAnnealingLR(of, 6),
    "chain": chain,
    "plateau": lambda of: schedulers.ReduceLROnPlateau(of, patience=1),
    "cycle": lambda of: schedulers.CyclicLR(of, 0.1, 1.0, step_size_up=3),
    "restarts": lambda of: schedulers.CosineAnnealingWarmRestarts(of, 3),
    "one_cycle": lambda of: schedulers.OneCycleLR(of, 1.0, 12),
    "polynomial": lambda of: schedulers.PolynomialLR(of, 9),
    "own": Own,
    "warmup": lambda of: lr_schedules.WarmupDecayLR(of, 20, warmup_num_steps=5),
}


def scheduled(kind, lr=0.5):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return oxizero.initialize(model=model, optimizer=optimizer, lr_scheduler=kind, config={})[0]


def trained(engine, steps):
    """What each step was made with."""
    told, is_plateau = [], isinstance(engine.lr_scheduler, schedulers.ReduceLROnPlateau)
    for step in steps:
        group = engine.optimizer.param_groups[0]
        told.append((float(group["lr"]), group["momentum"]))
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step({"metrics": 1.0 + step % 3} if is_plateau else None)
    return told


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("kind", OF_TORCH)
def test_a_scheduler_goes_on_as_if_nothing_had_been(tmp_path, kind, states):
    straight = scheduled(OF_TORCH[kind])
    trained(straight, range(4))
    straight.save_checkpoint(tmp_path)
    expected = trained(straight, range(4, 10))
    resumed = scheduled(OF_TORCH[kind])
    resumed.load_checkpoint(tmp_path, load_optimizer_states=states)
    assert trained(resumed, range(4, 10)) == expected
    assert len(set(expected)) > 1 or kind == "constant"
    one, other = straight.lr_scheduler.state_dict(), resumed.lr_scheduler.state_dict()
    one.pop("function", None), other.pop("function", None)
    assert same(one, other)


@pytest.mark.parametrize("kind", ["exponential", "chain", "one_cycle"])
def test_a_scheduler_of_a_learning_rate_that_is_a_tensor_goes_on(tmp_path, kind):
    straight = scheduled(OF_TORCH[kind], torch.tensor(0.5))
    trained(straight, range(3))
    straight.save_checkpoint(tmp_path)
    expected = trained(straight, range(4))
    resumed = scheduled(OF_TORCH[kind], torch.tensor(0.5))
    lr = resumed.optimizer.param_groups[0]["lr"]
    resumed.load_checkpoint(tmp_path)
    assert trained(resumed, range(4)) == expected
    assert resumed.optimizer.param_groups[0]["lr"] is lr


class Holds(Own):
    """Holds something that no checkpoint does."""

    def __init__(self, optimizer):
        self.x = {"k": object()}
        super().__init__(optimizer)


def test_what_a_scheduler_cannot_hold_is_named(tmp_path):
    engine = scheduled(Holds)
    with pytest.raises(oxizero.EngineError, match=r'lr_scheduler.x\["k"\] is `object`'):
        engine.save_checkpoint(tmp_path)


def test_what_was_saved_as_plain_json_is_loaded(tmp_path):
    engine = scheduled(OF_TORCH["milestones"])
    trained(engine, range(4))
    state = engine.lr_scheduler.state_dict()
    client_state = {"$": "tuple", "epoch": 3, "1": [2]}
    says = {
        "client_state": client_state,
        "groups": [{"lr": engine.get_lr()[0], "weight_decay": 0.0, "rule": "sgd"}],
        "counts": {"global_steps": 4},
        "lr_scheduler": state | {"milestones": {str(key): 1 for key in state["milestones"]}},
    }
    engine._core.save_checkpoint(str(tmp_path), "old", (json.dumps(says), "{}"), [])
    expected = trained(engine, range(4))
    resumed = scheduled(OF_TORCH["milestones"])
    assert resumed.load_checkpoint(tmp_path)[1] == client_state
    assert trained(resumed, range(4)) == expected


def test_a_scheduler_of_other_groups_is_refused(tmp_path):
    scheduled(OF_TORCH["step"]).save_checkpoint(tmp_path)
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    engine = oxizero.initialize(
        model=model, optimizer=optimizer, lr_scheduler=OF_TORCH["step"], config={}
    )[0]
    alone = {"load_module_strict": False, "load_optimizer_states": False}
    before = model.weight.clone()
    with pytest.raises(oxizero.EngineError, match="of 1 optimizer groups, and there are 2"):
        engine.load_checkpoint(tmp_path, **alone)
    assert before.equal(model.weight)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False, **alone)


BUFFERS = {
    "empty": torch.empty(0),
    "rows": torch.empty(3, 0, 2, dtype=torch.int64),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "flag": torch.tensor(True),
    "brain": torch.tensor(0.5, dtype=torch.bfloat16),
    "marked": torch.arange(1000, dtype=torch.float64) + 12345.0,
}


def buffered(buffers):
    model = nn.Linear(2, 1, bias=False)
    for name, value in buffers.items():
        model.register_buffer(name, value.clone())
    return made(model)


def of_buffers(engine):
    return {name: value.clone() for name, value in engine.module.named_buffers()}


def test_buffers_of_any_shape_come_back(tmp_path):
    buffered(BUFFERS).save_checkpoint(tmp_path)
    engine = buffered({name: torch.zeros_like(value) for name, value in BUFFERS.items()})
    engine.load_checkpoint(tmp_path)
    found = of_buffers(engine)
    assert all(found[name].equal(value) for name, value in BUFFERS.items())
    assert [found[name].dtype for name in BUFFERS] == [it.dtype for it in BUFFERS.values()]


def damage(folder):
    """Another element than was saved, in what the checkpoint has of `marked`."""
    needle, done = BUFFERS["marked"].numpy().tobytes(), 0
    for path in folder.glob("*/*.safetensors"):
        held = bytearray(path.read_bytes())
        if (at := held.find(needle)) >= 0:
            held[at] ^= 1
            path.write_bytes(held)
            done += 1
    assert done == 1


OTHERS = {
    "damaged": (BUFFERS, "checksum"),
    "more": (BUFFERS | {"more": torch.ones(1)}, "differ in their buffers more"),
    "shape": (BUFFERS | {"mask": torch.ones(1)}, r"`mask` has the shape \[3\].*\[1\] here"),
    "expanded": (BUFFERS, "`brain`: its elements share memory"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_buffers_that_are_refused_leave_all_as_it_was(tmp_path, what):
    before = buffered(BUFFERS | {"brain": torch.ones(4)} if what == "expanded" else BUFFERS)
    train(before)
    before.save_checkpoint(tmp_path)
    if what == "damaged":
        damage(tmp_path)
    engine = buffered(OTHERS[what][0])
    if what == "expanded":
        engine.module.register_buffer("brain", torch.ones(1).expand(4))
    train(engine, 3)
    weight, held = engine.module.weight.tolist(), of_buffers(engine)
    with pytest.raises(oxizero.EngineError, match=OTHERS[what][1]):
        engine.load_checkpoint(tmp_path)
    assert engine.module.weight.tolist() == weight and engine.global_steps == 3
    assert all(held[name].equal(value) for name, value in of_buffers(engine).items())
    train(engine)
    assert engine.module.weight.tolist() == [[-4.0, -4.0]]


def alone(rank, folder):
    """One rank refuses what the others do."""
    engine = made()
    engine.module.register_buffer("late", torch.ones(2 + (rank == 2)))
    started, said = time.monotonic(), []

    def refused(call, *args, **names):
        with pytest.raises((oxizero.EngineError, TypeError)) as raised:
            call(*args, **names)
        said.append(str(raised.value))

    bad = {"x": object()}
    refused(engine.save_checkpoint, folder, client_state=bad if rank == 0 else {})
    refused(engine.save_checkpoint, 3 if rank == 1 else folder)
    refused(engine.save_checkpoint, folder, save_latest=rank != 1)
    # Rank 0's is kept, and no other is looked at.
    engine.save_checkpoint(folder, client_state={"rank": 0} if rank == 0 else bad)
    refused(engine.load_checkpoint, 3 if rank == 1 else folder)
    refused(engine.load_checkpoint, 3 if rank == 1 else folder, tag="global_step0")
    refused(engine.load_checkpoint, folder)  # another shape on rank 2
    assert time.monotonic() - started < 60
    del engine.module._buffers["late"]
    alike = engine.load_checkpoint(folder, load_module_strict=False)[1]
    train(engine)
    return said, alike, engine.module.weight.tolist()


def test_what_one_rank_refuses_is_told_to_all(ranks, tmp_path):
    told = ranks(3, alone, tmp_path)
    assert all(of[1:] == ({"rank": 0}, [[-1.0, -1.0]]) for of in told)
    for at, (rank, why) in enumerate(
        [(0, 'client_state["x"]'), (1, "int"), (1, "save_latest"), (1, "int"), (1, "int"),
         (2, "`late` has the shape [2]")]
    ):
        for other, (said, *_) in enumerate(told):
            expected = why if other == rank else f"rank {rank} refused"
            assert expected in said[at], (at, other, said[at])


def looked_up(rank, folder):
    engine = made()
    engine.save_checkpoint(folder)
    own = folder / "none" if rank == 0 else folder
    assert engine.load_checkpoint(own) == (None, {})
    with pytest.raises(oxizero.EngineError, match="rank 1 refused" if rank == 0 else "none"):
        engine.load_checkpoint(folder / "none" if rank == 1 else folder)
    assert engine.load_checkpoint(folder)[0].endswith("global_step0")


def test_rank_0_looks_which_checkpoint_is_the_latest(ranks, tmp_path):
    ranks(2, looked_up, tmp_path)


def test_other_threads_run_while_buffers_are_read(tmp_path):
    model = nn.Linear(2, 1, bias=False)
    model.register_buffer("large", torch.zeros(16 << 20))
    engine = made(model)
    engine.save_checkpoint(tmp_path)
    parts = []
    for _ in range(3):  # the machine may have other work
        longest, is_over = 0.0, threading.Event()

        def count():
            nonlocal longest
            last = time.monotonic()
            while not is_over.is_set():
                time.sleep(0.001)
                last, before = time.monotonic(), last
                longest = max(longest, last - before)

        counting = threading.Thread(target=count)
        counting.start()
        started = time.monotonic()
        engine.load_checkpoint(tmp_path)
        whole = time.monotonic() - started
        is_over.set()
        counting.join()
        parts.append(longest / whole)
    assert min(parts) < 0.5, parts


def epochs(rank, folder):
    """What a rank draws in each epoch, and after a load."""
    data = [(torch.full((2,), float(at)),) for at in range(16)]
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD",
                                                                 "params": {"lr": 1.0}}}

    def begin():
        model = nn.Linear(2, 1)
        return oxizero.initialize(model=model, training_data=data, config=config)[::2]

    def drawn(loader):
        return [int(value) for (batch,) in loader for value in batch[:, 0]]

    engine, loader = begin()
    first = [drawn(loader), drawn(loader)]
    engine.save_checkpoint(folder)
    first += [drawn(loader), drawn(loader)]
    engine, loader = begin()
    engine.load_checkpoint(folder)
    assert [drawn(loader), drawn(loader)] == first[2:]
    loader.sampler.set_epoch(1)
    assert drawn(loader) == first[1]
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert drawn(loader) == first[2]
    return first


def test_each_epoch_has_an_order_of_its_own_that_goes_on(ranks, tmp_path):
    one, other = ranks(2, epochs, tmp_path)
    for number, (mine, theirs) in enumerate(zip(one, other)):
        assert sorted(mine + theirs) == list(range(16))
        assert mine not in one[:number]
