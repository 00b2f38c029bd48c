"""Stage 3: weights that are gathered while the module before computes."""

import pytest
import torch
from models import Gpt, build
from test_access import start
from test_stage3 import CHOSEN, Experts, Mixture, input_of, sizes
from torch import nn
from torch.utils.checkpoint import checkpoint

import oxizero
from oxizero import utils


def ahead(model, numel=10**6, live=10**9, **config):
    zero_optimization = {"stage": 3, "overlap_comm": True, "stage3_prefetch_bucket_size": numel,
                         "stage3_max_live_parameters": live}
    return start(model, 3, zero_optimization=zero_optimization, **config)


def starts(engine):
    """A list that grows with each gather that is started ahead, by the first parameter's name."""
    found = []
    for bucket in engine._sharded.buckets:
        def start(bucket=bucket, begin=bucket.start):
            was, _ = bucket._is_arriving, begin()
            if bucket._is_arriving and not was:
                found.append(bucket.names[0])
        bucket.start = start
    return found


class Layers(nn.Module):
    """Layers in the order that a call asks for, some of them run again in backward."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.use_reentrant = use_reentrant

    def forward(self, x, order=range(5)):
        for index in order:
            run = lambda x, layer=self.layers[index]: layer(x).tanh()  # noqa: E731
            if self.use_reentrant is None:
                x = run(x)
            else:
                x = checkpoint(run, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


def mixture():
    model = Mixture()
    utils.set_z3_leaf_modules(model, [Experts])
    return model


def of_layers(use_reentrant=None):
    """Orders that change, evaluation, gradients of inputs, and two graphs at once."""

    def run(engine, rank):
        x = input_of(rank, 3, 4).requires_grad_()
        orders = [range(5)] * 2 + [(4, 0, 0, 2), (4, 0, 0, 2), range(5), range(4)]
        for step, order in enumerate(orders):
            if step % 2 == 0:
                with torch.no_grad():
                    engine(x, order)
            loss = engine(x, order)
            if use_reentrant is None:
                torch.autograd.grad(loss, x, retain_graph=True)
            engine.backward(loss)
            first, second = engine(x), engine(x * 2, order)
            engine.backward(second)
            engine.backward(first)
            engine.step()

    return lambda: Layers(use_reentrant), run


def of_gpt(engine, rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        engine.backward(engine(Gpt.batch(generator)))
        engine.step()


def of_experts(engine, rank):
    for _ in range(4):
        engine.backward(engine(input_of(rank, 2, 4), CHOSEN[rank]))
        engine.step()


CASES = {
    "layers": of_layers(),
    "checkpoints": of_layers(use_reentrant=False),
    "reentrant": of_layers(use_reentrant=True),
    "gpt": (lambda: build(Gpt), of_gpt),
    "experts": (mixture, of_experts),
}


def same(rank, case):
    make, run = CASES[case]
    states, counts = [], []
    for numel in (0, 10**6):
        torch.manual_seed(5)
        engine = ahead(make(), numel)
        started = starts(engine)
        run(engine, rank)
        assert sizes(engine.module) == {0}
        states.append(engine.state_dict())
        counts.append(len(started))
        engine.destroy()
    assert all(states[1][name].equal(value) for name, value in states[0].items())
    return counts


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same_whether_weights_are_gathered_ahead_or_not(ranks, case):
    counts = ranks(2, same, case)
    assert counts[0] == counts[1] and counts[0][0] == 0 < counts[0][1]


def steps(engine, count=1):
    for _ in range(count):
        engine.backward(engine(torch.ones(1, 4)))
        engine.step()


def test_the_next_layer_is_gathered_while_one_computes():
    engine = ahead(Layers())
    started, live, counted = starts(engine), [], []
    steps(engine)
    assert started == [], "nobody knows the order"
    for layer in engine.module.layers:
        layer.register_forward_pre_hook(lambda *_: live.append(
            [layer.weight.untyped_storage().nbytes() > 0 for layer in engine.module.layers]))
        layer.register_forward_pre_hook(
            lambda *_: counted.append(dict(engine._core.memory)["gathered weights"]))
    loss = engine(torch.ones(1, 4))
    names = named(*range(5))
    assert started == names[1:] and sizes(engine.module) == {0}
    assert live == [[at in (now, now + 1) for at in range(5)] for now in range(5)]
    assert counted == [4 * 32 * sum(layers) for layers in live], "what is held, says the engine"
    engine.backward(loss)
    assert started[4:] == names[3::-1] and sizes(engine.module) == {0}
    engine.step()


def named(*indexes):
    return [f"layers.{index}.weight" for index in indexes]


def test_what_does_not_come_next_is_freed():
    engine, whole = ahead(Layers()), []
    layers = engine.module.layers
    steps(engine, 2)
    started = starts(engine)
    layers[3].register_forward_pre_hook(
        lambda *_: whole.append([layer.weight.untyped_storage().nbytes() > 0 for layer in layers]))
    engine(torch.ones(1, 4), (0, 1, 3, 4))
    assert started == named(1, 2), "what comes after 1 and 3 nobody knows"
    assert whole == [[index == 3 for index in range(5)]]


def test_evaluation_has_an_order_of_its_own():
    engine, x, order = ahead(Layers()), torch.ones(1, 4), (0, 2, 4)
    with torch.no_grad():
        engine(x, order)
    steps(engine)
    started = starts(engine)
    with torch.no_grad():
        engine(x, order)
    assert started == named(2, 4)
    engine(x)
    assert started[2:] == named(1, 2, 3, 4)


def test_nothing_is_gathered_ahead_beyond_what_the_configuration_allows():
    layer = 32  # elements, with padding
    for numel, live, is_ahead in (
        (0, 10**9, False), (layer - 13, 10**9, False), (layer, 10**9, True),
        (layer, 2 * layer, True), (layer, 2 * layer - 13, False),
    ):
        engine = ahead(Layers(), numel, live)
        assert {bucket.numel for bucket in engine._sharded.buckets} == {layer}
        started = starts(engine)
        steps(engine, 2)
        assert bool(started) == is_ahead, (numel, live)


def test_nothing_is_gathered_ahead_where_gathers_are_waited_for():
    zero_optimization = {"stage": 3, "overlap_comm": False}
    engine = start(Layers(), 3, zero_optimization=zero_optimization)
    started = starts(engine)
    steps(engine, 2)
    assert started == []


def test_weights_that_are_arriving_are_not_read():
    model = Layers()
    engine = ahead(model)
    steps(engine, 2)
    model.layers[1].register_forward_pre_hook(lambda *_: model.layers[2].weight.sum())
    with pytest.raises(RuntimeError, match="the weights of `layers.2.weight` and others are sha"):
        engine(torch.ones(1, 4))
    assert sizes(model) == {0}


def failed(rank):
    engine = ahead(Layers())
    steps(engine, 2)
    if rank == 1:
        return None
    with pytest.raises(oxizero.CommError, match="rank 1 ended"):
        steps(engine)
    assert sizes(engine.module) == {0}
    return True


def test_a_rank_that_ends_is_an_error_of_gathers_ahead(ranks):
    assert ranks(2, failed) == [True, None]
