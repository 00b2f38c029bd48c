"""What an engine promises beside the numbers."""

import copy
import gc
import os
import sys

import pytest
import torch
import torch.utils.checkpoint
from test_access import Constant, start

import oxizero
from oxizero import utils


class Branches(torch.nn.Module):
    """Two layers, of which a call uses those that it is told; a frozen one, and buffers."""

    def __init__(self):
        super().__init__()
        self.left = torch.nn.Linear(2, 1)
        self.right = torch.nn.Linear(2, 1)
        self.frozen = torch.nn.Linear(2, 1)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.frozen.requires_grad_(False)

    def forward(self, x, *names):
        return sum(getattr(self, name)(x).sum() for name in names)


def window(engine, *gradients):
    for gradient in gradients:
        engine.backward(engine(gradient))
        engine.step()
    return engine.module.weight.tolist()


def boundaries(rank):
    engine = start(Constant(1), 2, gradient_accumulation_steps=2)
    assert not engine.is_gradient_accumulation_boundary()
    assert window(engine, 2.0) == [0.0]
    assert engine.is_gradient_accumulation_boundary()
    assert window(engine, 4.0) == [-3.0]
    assert (engine.micro_steps, engine.global_steps) == (2, 1)
    # The epoch ends in the middle of a window: divided by what it held.
    engine.set_gradient_accumulation_boundary(True)
    assert engine.is_gradient_accumulation_boundary()
    assert window(engine, 1.0) == [-4.0]
    engine.set_gradient_accumulation_boundary(False)
    assert window(engine, 1.0, 2.0, 3.0) == [-4.0]
    engine.set_gradient_accumulation_boundary(True)
    assert window(engine, 2.0) == [-6.0]
    engine.set_gradient_accumulation_boundary(None)
    # What the window holds is given up.
    window(engine, 100.0)
    engine.discard_window()
    assert window(engine, 1.0, 3.0) == [-8.0]
    assert engine.get_global_grad_norm() == 2.0
    with engine.no_sync():
        engine.backward(engine(1.0 + rank))
        engine.step()
    assert window(engine, 2.0) == [-8.0 - (1.0 + 2.0 + 2.0 + 2.0) / 4]


def test_windows_end_when_they_are_told_to(ranks):
    ranks(2, boundaries)


def unused(rank, stage):
    model = Branches()
    model.count += rank
    if rank == 1:
        model.flags.logical_not_()
    names = (("left", "frozen"), ("left", "right"))[rank]
    engine = start(model, stage)
    assert model.count == 0 and model.flags.tolist() == [True, False]
    before = copy.deepcopy(model.state_dict())
    engine.backward(engine(torch.ones(1, 2), *names))
    engine.step()
    change = {name: before[name] - value for name, value in model.state_dict().items()
              if value.is_floating_point()}
    assert change["left.bias"].item() == pytest.approx(1.0)
    assert change["right.bias"].item() == pytest.approx(0.5), "the other rank gave zeros"
    assert change["frozen.weight"].abs().sum() == 0
    # Nobody uses anything: the ranks step, and nothing moves.
    before = copy.deepcopy(model.state_dict())
    engine.backward(engine(torch.ones(1, 2).requires_grad_(), "frozen"))
    engine.step()
    assert all(before[name].equal(value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_unused_and_frozen_parameters(ranks, stage):
    ranks(2, unused, stage)


def written(rank, stage, dtype):
    engine = start(Constant(4, dtype), stage)
    weight = engine.module.weight
    window(engine, 1.0)
    with torch.no_grad():
        weight.fill_(64.0)
    window(engine, 0.0)
    assert weight.tolist() == [64.0] * 4
    engine.load_state_dict({"weight": torch.full((4,), 8.0)})
    window(engine, 1.0)
    assert weight.tolist() == [7.0] * 4
    assert utils.safe_get_full_fp32_param(weight).tolist() == [7.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_that_are_written_between_steps_stay_written(ranks, stage, dtype):
    ranks(2, written, stage, dtype)


def test_masters_keep_their_precision_beside_a_write_that_changes_nothing():
    model = Constant(1, torch.bfloat16)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    engine, *_ = oxizero.initialize(
        model=model, optimizer=optimizer, config={"bf16": {"enabled": True}}
    )
    for _ in range(10):
        window(engine, 1.0)
        with torch.no_grad():
            model.weight.clamp_(-10.0, 10.0)
    master = utils.safe_get_full_fp32_param(model.weight)
    assert master.item() == pytest.approx(0.99000013, rel=1e-7)
    assert model.weight.item() == 0.98828125


def test_weights_are_the_engines_memory_and_outlive_it():
    engine = start(Constant(4), 1)
    weight = engine.module.weight
    address = weight.data_ptr()
    window(engine, 1.0, 2.0)
    assert weight.data_ptr() == address
    module = engine.module
    del engine
    gc.collect()
    assert module.weight.tolist() == [-3.0] * 4
    assert utils.safe_get_full_fp32_param(weight) is None


def test_a_model_has_one_engine_at_a_time():
    model = Constant(4)
    engine = start(model, 1)
    window(engine, 1.0)
    with pytest.raises(oxizero.ConfigError, match="`weight` is another engine's"):
        start(model, 1)
    engine.destroy()
    model(2.0).backward()
    assert model.weight.grad.tolist() == [2.0] * 4
    model.weight.grad = None
    assert window(start(model, 2), 1.0) == [-2.0] * 4


def test_replaced_memory_is_refused():
    engine = start(Constant(4), 1)
    engine.module.weight.data = torch.ones(4)
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.EngineError, match="`weight` has other memory"):
        engine.step()


def test_a_graph_that_needs_overwritten_weights_is_an_error():
    engine = start(Constant(4), 0)
    old = engine.module.weight.square().sum()
    window(engine, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_loss_backward_is_the_same_as_engine_backward():
    engine = start(Constant(2), 2)
    engine(3.0).backward()
    engine.step()
    assert engine.module.weight.tolist() == [-3.0] * 2
    with pytest.raises(oxizero.EngineError, match="no backward has ended"):
        engine.step()


def fp16(loss_scale=0):
    scaling = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale": loss_scale}
    return start(Constant(2), 1, fp16=scaling)


def test_fp16_scales_losses_and_skips_overflows():
    engine = fp16()
    assert (engine.module.weight.dtype, engine.loss_scale) == (torch.float16, 16.0)
    engine.backward(engine(2.0))
    assert utils.safe_get_full_grad(engine.module.weight).tolist() == [2.0] * 2
    engine.step()
    engine.scale(engine(2.0)).backward()
    engine.step()
    assert engine.module.weight.tolist() == [-4.0] * 2
    engine.backward(engine(60000.0))
    engine.step()
    assert (engine.skipped_steps, engine.global_steps, engine.loss_scale) == (1, 3, 8.0)
    assert engine.module.weight.tolist() == [-4.0] * 2


class Checkpointed(torch.nn.Module):
    """Two layers, the second one used twice; run again in backward, if at all, as torch says."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        torch.manual_seed(3)
        self.use_reentrant = use_reentrant
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        for layer in (self.layers[0], self.layers[1], self.layers[1]):
            if self.use_reentrant is None:
                x = layer(x).tanh()
            else:
                run = torch.utils.checkpoint.checkpoint
                x = run(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=self.use_reentrant)
        return x.float().square().sum()


def checkpointed(rank, half):
    grads = []
    for use_reentrant in (None, False, True):
        model = Checkpointed(use_reentrant)
        engine = start(model, 2, fp16={"enabled": half, "initial_scale_power": 4})
        x = torch.arange(6.0).view(2, 3).to(model.layers[0].weight.dtype) + rank
        engine.backward(engine(x.requires_grad_()))
        grads.append(utils.safe_get_full_model_grads(model))
        engine.step()
    for others in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(others[name], grad, rtol=2e-3 if half else 1e-6, atol=1e-6)


@pytest.mark.parametrize("half", [False, True])
def test_checkpointing_gives_the_same_gradients(ranks, half):
    ranks(2, checkpointed, half)


def test_an_unscaled_loss_is_refused_where_losses_are_scaled():
    engine = fp16(loss_scale=128)
    with pytest.raises(oxizero.EngineError, match="engine.scale"):
        engine(2.0).backward()
    engine.zero_grad()
    engine.backward(engine(2.0))
    engine.step()
    assert engine.module.weight.tolist() == [-2.0] * 2


def test_schedulers_change_the_groups_that_the_engine_reads():
    def halves(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model = Constant(1)
    client = torch.optim.SGD(model.parameters(), lr=1.0)
    config = {"gradient_accumulation_steps": 2}
    engine, optimizer, _, scheduler = oxizero.initialize(
        model=model, optimizer=client, config=config, lr_scheduler=halves
    )
    assert window(engine, 1.0, 1.0) == [-1.0]
    assert (engine.get_lr(), scheduler.get_last_lr()) == ([0.5], [0.5])
    assert window(engine, 1.0, 1.0) == [-1.5]
    client.param_groups[0]["lr"] = 2.0
    client.param_groups[0]["weight_decay"] = 1.0
    assert window(engine, 1.0, 1.0) == [-1.5 - 2.0 * (1.0 - 1.5)]
    engine.backward(engine(0.0))
    optimizer.step()
    assert engine.micro_steps == 7


def differing_rates(rank):
    model = Constant(1)
    client = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = oxizero.initialize(model=model, optimizer=client, config={})
    client.param_groups[0]["lr"] = 1.0 + rank
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.EngineError, match="rank 1 steps with other learning rates"):
        engine.step()


def test_ranks_that_would_step_differently_are_told(ranks):
    ranks(2, differing_rates)


def dies(rank):
    engine = start(Constant(1), 1)
    if rank == 1:
        os._exit(0)
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.CommError, match="rank 1 ended"):
        engine.step()


def forks(rank):
    engine = start(Constant(1), 1)
    child = os.fork()
    if child == 0:
        sys.unraisablehook = lambda _: os._exit(1)
        del engine
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert window(engine, 1.0, 1.0) == [-2.0]


def test_a_fork_is_no_rank_and_leaves_the_world_alone(ranks):
    ranks(2, forks)


def test_a_dead_rank_is_an_exception_on_the_others(ranks):
    ranks(3, dies)


def test_a_sparse_gradient_is_refused():
    model = torch.nn.Embedding(4, 2, sparse=True)
    engine = start(model, 0)
    with pytest.raises(oxizero.EngineError, match="sparse=False"):
        engine.backward(engine(torch.tensor([1])).sum())


def test_a_gradient_with_gaps_and_an_empty_parameter_are_taken():
    model = torch.nn.ParameterList([torch.zeros(3, 2), torch.zeros(0, 8), torch.tensor(1.0)])
    engine = start(model, 2)
    factor = torch.arange(6.0).view(2, 3)
    engine.backward((model[0].t() * factor).sum() + model[1].sum() + model[2] * 2)
    assert utils.safe_get_full_grad(model[1]).shape == (0, 8)
    assert utils.safe_get_full_grad(model[2]).shape == ()
    engine.step()
    assert model[0].equal(-factor.t()) and model[2].item() == -1.0


def test_train_and_eval_reach_the_module():
    engine = start(Constant(2), 0)
    assert engine.eval() is engine and not engine.module.training
    assert engine.train().module.training


def test_training_data_is_shared_among_ranks():
    data = torch.arange(6.0).unsqueeze(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    model = torch.nn.Linear(1, 1)
    engine, _, loader, _ = oxizero.initialize(model=model, training_data=data, config=config)
    assert sum(len(batch) for batch in loader) == 6
    assert engine.train_batch_size() == 2
