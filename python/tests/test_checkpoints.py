"""Checkpoints that one world saves and another goes on from."""

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
    with pytest.raises(oxizero.EngineError, match="no JSON"):
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
