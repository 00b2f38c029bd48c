"""What goes wrong outside of the engine: failed passes, models and worlds that change."""

import pytest
import torch
from mishaps import SGD, made, train
from torch import nn

import oxizero


def test_the_clients_own_optimizer_steps_the_engine_until_it_is_destroyed():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    client = torch.optim.SGD(model.parameters(), lr=1.0)
    halved = torch.optim.lr_scheduler.StepLR(client, 1, 0.5)
    engine = oxizero.initialize(model=model, optimizer=client, config={})[0]
    for _ in range(2):
        client.zero_grad()
        engine(torch.ones(1, 2)).sum().backward()
        client.step()
        halved.step()
    assert engine.global_steps == 2 and model.weight.tolist() == [[-1.5, -1.5]]
    engine.destroy()
    model(torch.ones(1, 2)).sum().backward()
    client.step()
    assert model.weight.tolist() == [[-1.75, -1.75]]


def test_a_gradient_that_somebody_sets_is_refused():
    engine = made()
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.module.weight.grad = torch.ones(1, 2)
    with pytest.raises(oxizero.EngineError, match="`weight` has a `grad`.*safe_set_full_grad"):
        engine.step()
    engine.module.weight.grad = None
    engine.step()
    assert engine.module.weight.tolist() == [[-1.0, -1.0]]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("no room")


@pytest.mark.parametrize("raw", [False, True])
def test_a_failed_backward_is_given_up_by_name(raw):
    model = nn.Module()
    first = model.first = nn.Parameter(torch.zeros(2))
    second = model.second = nn.Parameter(torch.zeros(2))
    engine = made(model)
    if raw:
        model.forward = lambda: Fails.apply(first * 1).sum() + second.sum()
        with pytest.raises(MemoryError):
            engine().backward()
        model.forward = lambda: first.sum()
        loss = engine()
    else:
        loss = first.sum()
        with pytest.raises(MemoryError):
            engine.backward(Fails.apply(first * 1).sum() + second.sum())
    with pytest.raises(oxizero.EngineError, match=r"engine.discard_window\(\)"):
        engine.backward(loss)
    with pytest.raises(oxizero.EngineError, match=r"engine.discard_window\(\)"):
        engine.step()
    engine.discard_window()
    engine.backward(first.sum())
    engine.step()
    assert first.tolist() == [-1.0, -1.0] and second.tolist() == [0.0, 0.0]


def test_zero_grad_gives_up_no_finished_micro_batch():
    engine = made(gradient_accumulation_steps=2)
    engine.optimizer.zero_grad()
    train(engine)
    with pytest.raises(oxizero.EngineError, match="1 micro-batches of the 2"):
        engine.optimizer.zero_grad()
    train(engine)
    engine.zero_grad()
    assert engine.global_steps == 1


def test_a_step_that_is_not_finite_is_told(capsys):
    engine = made()
    train(engine)
    assert engine.get_global_grad_norm() == pytest.approx(2**0.5)
    engine.backward(engine(torch.full((1, 2), float("nan"))).sum())
    engine.step()
    assert engine.get_global_grad_norm() is None and engine.skipped_steps == 1
    assert "step 2 is skipped: the gradient of `weight` is not finite" in capsys.readouterr().out


def test_a_graph_notices_weights_that_were_set():
    engine = made(nn.ParameterList([torch.ones(3)]))
    (weight,) = engine.module
    loss = weight.square().sum()
    oxizero.utils.safe_set_full_fp32_param(weight, torch.full((3,), 10.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


class Absent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_function_may_give_no_gradient():
    engine = made(nn.ParameterList([torch.zeros(2), torch.ones(2)]))
    first, second = engine.module
    engine.backward(Absent.apply(first * 1, second).sum())
    engine.step()
    assert first.tolist() == [-1.0, -1.0] and second.tolist() == [1.0, 1.0]


def test_gradients_of_before_are_refused():
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(oxizero.ConfigError, match=r"`weight` has a gradient.*model.zero_grad"):
        made(model)


def shared():
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(4))
    model.b = nn.Parameter(model.a.data[2:])
    return model


def viewed():
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(4))
    model.register_buffer("b", model.a.data)
    return model


def spanned():
    """A buffer lies around the parameter, and one between the starts of both."""
    model = nn.Module()
    whole = torch.zeros(100)
    model.register_buffer("a", whole)
    model.register_buffer("between", whole[1:2])
    model.b = nn.Parameter(whole[50:60])
    return model


def surrounded():
    """A parameter lies around a buffer, after which another one begins."""
    model = nn.Module()
    whole = torch.zeros(100)
    model.b = nn.Parameter(whole)
    model.register_buffer("a", whole[50:60])
    return model


@pytest.mark.parametrize("kind", [shared, viewed, spanned, surrounded])
def test_parameters_that_share_memory_are_refused(kind):
    with pytest.raises(oxizero.ConfigError, match="`[ab]` and .* `[ab]` share memory"):
        made(kind())


def test_parameters_beside_each_other_in_memory_are_taken():
    memory = torch.zeros(4)
    made(nn.ParameterList([nn.Parameter(memory[:2]), nn.Parameter(memory[2:])]))
    made(nn.LSTM(2, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(1, 2))),
        lambda model: model.append(nn.Linear(1, 1)),
        lambda model: model.load_state_dict({"0.weight": torch.ones(1, 2)}, assign=True),
    ],
)
def test_a_parameter_that_is_new_is_refused(change):
    engine = made(nn.Sequential(nn.Linear(2, 1, bias=False)))
    change(engine.module)
    engine.backward(sum(param.sum() for param in engine.module.parameters()))
    with pytest.raises(oxizero.EngineError, match="is new, or another tensor"):
        engine.step()


def test_options_that_the_engine_does_not_have_are_refused_later_too():
    engine = made()
    engine.optimizer.param_groups[0]["maximize"] = True
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(oxizero.ConfigError, match="maximize"):
        engine.step()


def test_groups_are_told_all_or_none():
    model = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    first, second = model
    optimizer = torch.optim.SGD([{"params": [param], "lr": 1.0} for param in model], lr=1.0)
    engine, *_ = oxizero.initialize(model=model, optimizer=optimizer, config={})
    engine.backward(first.sum() + second.sum())
    one, other = engine.optimizer.param_groups
    one["lr"], other["lr"] = 5.0, -1.0
    with pytest.raises(oxizero.ConfigError, match="-1"):
        engine.step()
    one["lr"], other["lr"] = 1.0, 2.0
    engine.step()
    assert (first.item(), second.item()) == (-1.0, -2.0)


def test_parameters_of_the_optimizer_stay():
    engine = made()
    engine.optimizer.client.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(oxizero.ConfigError, match="other parameters than in initialize"):
        engine.step()


def swapped(rank):
    model = nn.Linear(2, 1)
    for name in ("a", "b") if rank == 0 else ("b", "a"):
        model.register_buffer(name, torch.full((2,), 1.0 if name == "a" else 2.0))
    made(model)


def test_buffers_in_another_order_are_named(ranks):
    with pytest.raises(pytest.fail.Exception, match="rank 1 has another buffer .* `a torch.float"):
        ranks(2, swapped)


def swapped_beside_parts(rank):
    model = nn.Linear(2, 1)
    oxizero.mark_split(model.weight, 1, [0, 1] if rank < 2 else [2, 3])
    for name in ("a", "b") if rank < 3 else ("b", "a"):
        model.register_buffer(name, torch.ones(2 if name == "a" else 3))
    made(model)


def test_ranks_that_hold_the_same_parts_are_named_as_in_the_world(ranks):
    with pytest.raises(pytest.fail.Exception, match="rank 3 has another buffer than rank 1"):
        ranks(4, swapped_beside_parts)


def steps_or_reads(rank):
    engine = made()
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(oxizero.CommError) as raised:
        if rank == 0:
            oxizero.utils.safe_get_full_model_grads(engine)
        else:
            engine.step()
    return str(raised.value)


def test_ranks_that_read_and_step_are_told_both_calls(ranks):
    for told in ranks(2, steps_or_reads):
        assert "bytes for safe_get_full_model_grads" in told and "bytes for step" in told


def reads_another(rank):
    engine = made(nn.Linear(2, 1))
    with pytest.raises(oxizero.EngineError) as raised:
        oxizero.utils.safe_get_full_fp32_param(list(engine.module.parameters())[rank])
    return str(raised.value)


def test_ranks_that_read_different_parameters_are_told_both(ranks):
    for told in ranks(2, reads_another):
        assert "fp32_param of `weight`" in told and "fp32_param of `bias`" in told


OTHER_CONFIGS = {
    "clip": {"gradient_clipping": 1.0},
    "stage": {"zero_optimization": {"stage": 2}},
    "wire": {"communication_data_type": "bf16"},
    "lr": {"optimizer": {"type": "SGD", "params": {"lr": 2.0}}},
    "rule": {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}},
}


def started_with(rank, difference):
    model = nn.Linear(2 + (rank == 1 and difference == "shape"), 1)
    if rank == 1 and difference == "more":
        model.another = nn.Parameter(torch.zeros(1))
    if rank == 1 and difference == "name":
        model.register_parameter("other", model.weight)
        del model.weight
    if rank == 1 and difference == "dtype":
        model.bfloat16()
    config = OTHER_CONFIGS.get(difference, {}) if rank == 1 else {}
    with pytest.raises(oxizero.EngineError) as raised:
        oxizero.initialize(model=model, config=SGD | config)
    return str(raised.value)


@pytest.mark.parametrize(
    "difference,fact,zeros,ones",
    [
        ("dtype", "the dtype of parameter `weight`", "float32", "bfloat16"),
        ("shape", "the shape of parameter `weight`", "[1, 2]", "[1, 3]"),
        ("name", "parameter 0", "`weight`", "`bias`"),
        ("more", "parameter 2", "absent", "`another`"),
        ("clip", "`gradient_clipping`", "none", "1"),
        ("stage", "`zero_optimization.stage`", "0", "2"),
        ("wire", "`communication_data_type`", "fp32", "bf16"),
        ("lr", "what the optimizer's param_groups have", "lr 1.0 and", "lr 2.0 and"),
        ("rule", "the optimizer", "SGD with", "AdamW with betas 0.9 and 0.999, eps 1e-8"),
    ],
)
def test_ranks_that_start_differently_are_told_in_what(ranks, difference, fact, zeros, ones):
    for told in ranks(3, started_with, difference):
        assert told.startswith(f"{fact} is {zeros}") and f" on rank 0 and {ones}" in told, told
        assert " on rank 1; give every rank the same" in told, told


def expanded(rank):
    model = nn.Linear(2, 1)
    model.register_buffer("odd", torch.ones(1).expand(4))
    with pytest.raises(oxizero.ConfigError, match="buffer `odd`"):
        made(model)


def test_a_buffer_that_cannot_be_overwritten_is_named(ranks):
    ranks(2, expanded)
    model = nn.Linear(2, 1)
    model.register_buffer("odd", torch.ones(1).expand(4))
    train(made(model))


def given_back(rank, stage):
    """Initializes that fail, early or late, leave the model as it was."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    config = SGD | {"zero_optimization": {"stage": stage}}

    def refused(match):
        with pytest.raises((oxizero.ConfigError, oxizero.EngineError), match=match):
            oxizero.initialize(model=model, config=config)
        told = model.state_dict()
        assert all(told[name].equal(value) for name, value in expected.items())
        for module in model:
            assert not module._forward_pre_hooks and not module._state_dict_hooks
            assert not module.weight._post_accumulate_grad_hooks
        model(torch.ones(1, 2)).sum().backward()
        assert model[0].weight.grad.count_nonzero() > 0
        model.zero_grad()

    model.register_buffer("odd", torch.ones(1).expand(4))
    refused("buffer `odd`")
    model.register_buffer("odd", torch.ones(4 + rank))
    refused("another buffer")
    model.register_buffer("odd", torch.ones(4))
    train(oxizero.initialize(model=model, config=config)[0])


@pytest.mark.parametrize("stage", [2, 3])
def test_an_initialize_that_fails_leaves_the_model_as_it_was(ranks, stage):
    ranks(2, given_back, stage)


def retried(rank):
    if rank == 1:
        with pytest.raises(oxizero.ConfigError):
            oxizero.initialize(model=nn.Linear(2, 1), config=[])
    else:
        with pytest.raises(oxizero.ConfigError):
            oxizero.initialize(model=None, config=SGD)
    engine = made()
    train(engine)
    return engine.module.weight.tolist()


def test_after_a_failed_initialize_ranks_meet_in_the_next(ranks):
    assert ranks(2, retried) == [[[-1.0, -1.0]]] * 2


@pytest.mark.parametrize(
    ("names", "said"),
    [({"RANK": "-1"}, "RANK = -1"), ({"RANK": "5"}, "RANK = 5"), ({"WORLD_SIZE": "0"}, "SIZE = 0")],
)
def test_ranks_that_no_world_has_are_refused(monkeypatch, names, said):
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(oxizero.ConfigError, match=said):
        made()


def test_odd_configurations_are_refused_in_words():
    model = nn.Linear(2, 1)
    with pytest.raises(oxizero.ConfigError, match="give a dict, or the path"):
        oxizero.initialize(model=model, config=[])
    with pytest.raises(oxizero.ConfigError, match="is no JSON"):
        oxizero.initialize(model=model, config=SGD | {"gradient_clipping": float("nan")})
    with pytest.raises(oxizero.ConfigError, match="one tensor"):
        oxizero.initialize(model=model, model_parameters=model.weight, config=SGD)
    with pytest.raises(oxizero.ConfigError, match="timedelta"):
        oxizero.init_distributed(timeout=30)
    made(model, steps_per_print=float("inf"))


class Raises(torch.autograd.Function):
    """The loss's own backward fails, before there is a gradient."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def test_a_backward_that_fails_before_a_gradient_leaves_no_scale():
    engine = made(fp16={"enabled": True, "initial_scale_power": 4})
    x = torch.ones(1, 2, dtype=torch.half)
    with pytest.raises(ZeroDivisionError):
        engine.scale(Raises.apply(engine(x).sum())).backward()
    loss = engine(x).sum()
    with pytest.raises(oxizero.EngineError, match="not multiplied by the loss scale"):
        loss.backward()
    engine.backward(engine(x).sum())
    engine.step()


@pytest.mark.parametrize("fails", [lambda loss: loss.detach(), Raises.apply])
def test_a_backward_that_fails_before_a_gradient_has_contributed_nothing(fails):
    engine = made(gradient_accumulation_steps=2)
    x = torch.ones(1, 2)
    for _ in range(2):
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            engine.backward(fails(engine(x).sum()))
        engine.backward(engine(x).sum())
        engine.step()
    assert engine.module.weight.tolist() == [[-1.0, -1.0]]
