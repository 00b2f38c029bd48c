"""Checkpoints that one world saves and another goes on from."""

import random

import pytest
import torch
from models import Conv, Gpt, build
from test_access import start
from test_stage3 import step

import oxizero

KINDS = [Gpt, Conv]
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}


def batch(kind, number):
    return kind.batch(torch.Generator().manual_seed(number))


def trained(rank, kind, stage, steps, folder, resumes=False, saves=None):
    """Trains, from a checkpoint if it is said so; the model's state after it."""
    engine = start(build(kind), stage, optimizer=ADAMW)
    first = 0
    if resumes:
        # What was trained before does not count.
        step(engine, batch(kind, 99))
        path, client_state = engine.load_checkpoint(folder)
        assert path.endswith(f"global_step{client_state['next']}")
        first = engine.global_steps
        assert first == client_state["next"]
    for number in range(first, steps):
        # The same batch on every rank, so that the number of ranks does not matter.
        step(engine, batch(kind, number))
        if number + 1 == saves:
            assert engine.save_checkpoint(folder, client_state={"next": number + 1})
    return {name: value.clone() for name, value in engine.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [(0, 0), (1, 1), (2, 2), (3, 3), (1, 2), (2, 3), (3, 0)])
def test_a_run_goes_on_to_the_bit(ranks, tmp_path, kind, stages):
    straight = ranks(2, trained, kind, stages[0], 5, tmp_path, False, 3)
    resumed = ranks(2, trained, kind, stages[1], 5, tmp_path, True)
    for one, other in zip(straight, resumed, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


def test_two_ranks_of_one_and_one_of_two(ranks, tmp_path):
    straight = ranks(2, trained, Gpt, 3, 4, tmp_path, False, 2)[0]
    resumed = ranks(1, trained, Gpt, 2, 4, tmp_path, True)[0]
    assert all(straight[name].equal(resumed[name]) for name in straight)


def draws():
    numpy = pytest.importorskip("numpy")
    of_numpy = [*numpy.random.rand(2), numpy.random.randn()]
    return [random.random(), random.gauss(0, 1), *torch.rand(3).tolist(), *of_numpy]


def drawing(rank, folder, resumes):
    engine = start(build(Conv), 1)
    draws()
    if resumes:
        engine.load_checkpoint(folder)
        return draws()
    for seed in (random.seed, torch.manual_seed):
        seed(10 + rank)
    draws()  # gauss keeps a number for the next call
    engine.save_checkpoint(folder)
    return draws()


def test_each_rank_goes_on_with_its_random_numbers(ranks, tmp_path):
    drawn = ranks(2, drawing, tmp_path, False)
    assert drawn[0] != drawn[1]
    assert ranks(2, drawing, tmp_path, True) == drawn


def other_world(rank, folder):
    engine = start(build(Conv), 1)
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    engine.load_checkpoint(folder)
    assert torch.get_rng_state().equal(before)


def test_in_another_world_random_states_stay_and_it_is_said(ranks, tmp_path, capfd):
    ranks(2, drawing, tmp_path, False)
    ranks(1, other_world, tmp_path)
    assert "random states are those of 2 ranks" in capfd.readouterr().out
    ranks(2, weights_keep_random_states, tmp_path)


def weights_keep_random_states(rank, folder):
    engine = start(build(Conv), 1)
    before = torch.get_rng_state()
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert torch.get_rng_state().equal(before)


OTHERS = {
    "Adam": {"betas": (0.5, 0.75), "eps": 1e-4, "weight_decay": 0.25, "lr": 0.5},
    "SGD": {"momentum": 0.5, "nesterov": True, "weight_decay": 0.25, "lr": 0.5},
    "Lion": {"betas": (0.5, 0.75), "weight_decay": 0.25, "lr": 0.5},
}


def settings(rank, folder, rule):
    """Settings that were changed while training, and an optimizer that was made with others."""
    made = {"lr": 0.01} | ({"momentum": 0.9} if rule == "SGD" else {})
    engine = start(build(Conv), 2, optimizer={"type": rule, "params": made})
    engine.optimizer.param_groups[0].update(OTHERS[rule])
    step(engine, batch(Conv, 0))
    engine.save_checkpoint(folder)
    step(engine, batch(Conv, 1))
    expected = engine.state_dict()
    engine = start(build(Conv), 2, optimizer={"type": rule, "params": made})
    engine.load_checkpoint(folder)
    group = engine.optimizer.param_groups[0]
    assert {name: group[name] for name in OTHERS[rule]} == OTHERS[rule]
    step(engine, batch(Conv, 1))
    assert all(expected[name].equal(value) for name, value in engine.state_dict().items())


@pytest.mark.parametrize("rule", OTHERS)
def test_an_optimizers_settings_are_those_of_the_checkpoint(ranks, tmp_path, rule):
    ranks(2, settings, tmp_path, rule)


def another_rule(rank, folder):
    made = {"lr": 0.5, "betas": (0.5, 0.75), "weight_decay": 0.25, "adam_w_mode": False}
    engine = start(build(Conv), 1, optimizer={"type": "Adam", "params": made})
    engine.save_checkpoint(folder)
    engine = start(build(Conv), 1, optimizer=ADAMW)
    engine.load_checkpoint(folder)
    group = engine.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.5, 0.25, (0.9, 0.999))


def test_another_rule_keeps_its_own_settings(ranks, tmp_path):
    ranks(1, another_rule, tmp_path)


def weights_alone(rank, folder):
    engine = start(build(Conv), 2)
    engine.module.shift.fill_(7.0)
    saved = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.save_checkpoint(folder, tag="mine")
    step(engine, batch(Conv, 0))
    engine.module.shift.fill_(1.0)
    lr = engine.get_lr()
    path, client_state = engine.load_checkpoint(folder, tag="mine", load_module_only=True)
    assert path.endswith("mine") and client_state == {}
    assert engine.global_steps == 1 and engine.get_lr() == lr
    assert all(saved[name].equal(value) for name, value in engine.state_dict().items())
    assert engine.load_checkpoint(folder / "empty") == (None, {})


def test_weights_are_loaded_alone_with_buffers(ranks, tmp_path):
    ranks(2, weights_alone, tmp_path)


def refusals(rank, folder):
    engine = start(build(Conv), 1)
    loss = engine(batch(Conv, 0))
    engine.backward(loss)
    with pytest.raises(oxizero.EngineError, match="between a backward and its step"):
        engine.save_checkpoint(folder)
    engine.step()
    with pytest.raises(oxizero.EngineError, match="client_state|rank 0 refused"):
        engine.save_checkpoint(folder, client_state={"weights": torch.zeros(1)})
    engine.save_checkpoint(folder)
    other = start(build(Gpt), 1)
    with pytest.raises(oxizero.EngineError, match="another model's"):
        other.load_checkpoint(folder)
    with pytest.raises(oxizero.EngineError, match="no checkpoint"):
        other.load_checkpoint(folder, tag="none")
    step(other, batch(Gpt, 0))


def test_what_cannot_be_saved_or_loaded_is_refused(ranks, tmp_path):
    ranks(2, refusals, tmp_path)
