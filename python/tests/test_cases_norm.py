"""Norms, clipping, skipped steps, and loss scales."""

import contextlib
import logging
import math

import pytest
import torch
from claims import Claims, Given, backward, grads, masters, window

import oxizero
from oxizero import utils

INF = math.inf
# Changes at once, in either direction.
EAGER = {"enabled": True, "hysteresis": 1, "loss_scale_window": 1}

claims = Claims()


@contextlib.contextmanager
def logged():
    """What the package says on this rank."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    utils.logger.addHandler(handler)
    try:
        yield told
    finally:
        utils.logger.removeHandler(handler)


@claims()
def shards_of_three_and_four_are_clipped_as_one_vector(at):
    clipped = {"w": torch.tensor([-0.6, -0.8]).tolist()}
    engine = at.start(Given(w=[0.0, 0.0]), gradient_clipping=1.0)
    window(engine, {"w": [3.0, 4.0]})
    assert engine.get_global_grad_norm() == 5.0 and masters(engine) == clipped
    engine = at.start(Given(w=[0.0, 0.0]))
    backward(engine, w=[3.0, 4.0])
    assert engine.clip_grad_norm_(1.0) == 5.0
    engine.step()
    assert masters(engine)["w"] == pytest.approx(clipped["w"], rel=1e-7)


@claims()
def a_gradient_that_all_ranks_have_counts_once_beside_parts(at):
    model = Given(whole=[0.0], part=[0.0])
    oxizero.mark_split(model.part, 0, [0, 1])
    engine = at.start(model, bucket=1)
    backward(engine, whole=12.0, part=(3.0, 4.0)[at.rank])
    assert engine.clip_grad_norm_(100.0) == 13.0
    engine.step()
    assert engine.get_global_grad_norm() == 13.0


@claims()
def the_infinity_norm_is_the_largest_magnitude(at):
    for bucket in (1, None):
        engine = at.start(Given(a=[0.0], b=[0.0]), bucket=bucket)
        backward(engine, a=3.0, b=-4.0)
        assert engine.clip_grad_norm_(2.0, "inf") == 4.0
        assert grads(engine) == {"a": [1.5], "b": [-2.0]}


@claims()
def an_infinite_gradient_skips_the_step_on_all_ranks(at):
    for wrong in (INF, -INF, math.nan):
        model = Given(fine=[1.0, 2.0], bad=[3.0, 4.0])
        engine = at.start(model, gradient_clipping=1.0)
        before = masters(engine)
        with logged() as told:
            window(engine, {"fine": 1.0, "bad": [wrong, 1.0] if at.rank == 1 else 1.0})
        assert (engine.skipped_steps, engine.global_steps) == (1, 1)
        assert engine.get_global_grad_norm() is None and masters(engine) == before
        if at.rank == 0:
            (said,) = told
            assert "the gradient of `bad` is not finite, rank " in said
            if at.back_end == "native":
                assert "rank 1 says" in said
        window(engine, {"fine": 1.0, "bad": 1.0})
        assert engine.skipped_steps == 1 and engine.get_global_grad_norm() == 2.0
        assert masters(engine) == {"fine": [0.5, 1.5], "bad": [2.5, 3.5]}


@claims()
def half_the_gradient_has_half_the_norm(at):
    engine = at.start(Given(w=[0.0, 0.0, 0.0, 0.0]))
    for halve in (halve_parts, halve_whole):
        backward(engine, w=[2.0, 4.0, 4.0, 8.0])
        halve(engine.module.w)
        assert engine.clip_grad_norm_(100.0) == 5.0
        engine.step()
        assert engine.get_global_grad_norm() == 5.0
    assert masters(engine) == {"w": [-2.0, -4.0, -4.0, -8.0]}


def halve_parts(param):
    utils.safe_set_local_grad(param, utils.safe_get_local_grad(param) / 2)


def halve_whole(param):
    utils.safe_set_full_grad(param, utils.safe_get_full_grad(param) / 2)


@claims()
def a_gradient_is_divided_by_the_scale_it_was_computed_under(at):
    # The stored 3 * 65536 and 4 * 65536 are in bf16, which has them.
    weight = torch.zeros(2, dtype=torch.bfloat16)
    engine = at.start(Given(w=weight), fp16=EAGER | {"initial_scale_power": 16})
    for steps in (1, 2, 3):
        scale = 2.0 ** (15 + steps)
        assert engine.loss_scale == scale
        backward(engine, w=[3.0, 4.0])
        assert grads(engine) == {"w": [3.0, 4.0]}
        engine.step()
        assert engine.loss_scale == 2 * scale and engine.get_global_grad_norm() == 5.0
        assert masters(engine) == {"w": [-3.0 * steps, -4.0 * steps]}


@claims()
def a_step_in_which_the_scale_grows_applies_the_whole_gradient(at):
    engine = at.start(Given(w=[0.0]), fp16=EAGER | {"initial_scale_power": 10})
    window(engine, {"w": 8.0})
    assert engine.loss_scale == 2048.0 and masters(engine) == {"w": [-8.0]}


@claims()
def micro_batches_of_a_window_have_one_scale(at):
    fp16 = EAGER | {"initial_scale_power": 10}
    engine = at.start(Given(w=[0.0]), fp16=fp16, gradient_accumulation_steps=2)
    window(engine, *({"w": gradient} for gradient in (1.0, 3.0, 6.0)))
    assert engine.loss_scale == 2048.0
    backward(engine, w=2.0)
    assert grads(engine) == {"w": [4.0]}
    engine.step()
    assert masters(engine) == {"w": [-6.0]}


@claims()
def an_overflow_on_one_rank_skips_the_step_on_all_and_halves_the_scale(at):
    params = {"warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    fp16 = EAGER | {"loss_scale_window": 100}
    schedule = {"type": "WarmupLR", "params": params}
    engine = at.start(Given(w=[1.0, 2.0]), fp16=fp16, scheduler=schedule)
    window(engine, *[{"w": 0.25}] * 2)
    before, rates = masters(engine), engine.get_lr()
    assert engine.loss_scale == 65536.0 and rates != [0.0]
    window(engine, {"w": 1e30 if at.rank == 1 else 0.25})
    assert (engine.skipped_steps, engine.loss_scale) == (1, 32768.0)
    assert (masters(engine), engine.get_lr()) == (before, rates)
    window(engine, {"w": 0.25})
    assert engine.skipped_steps == 1 and engine.get_lr() != rates
    assert masters(engine)["w"] == [weight - 0.25 * rates[0] for weight in before["w"]]


@claims()
def hysteresis_lets_one_overflow_pass_and_the_minimum_is_an_error_with_advice(at):
    fp16 = {"enabled": True, "hysteresis": 2, "initial_scale_power": 2, "min_loss_scale": 2}
    engine = at.start(Given(w=[1.0]), fp16=fp16)
    scales = []
    for _ in range(2):
        window(engine, {"w": INF if at.rank == 0 else 1.0})
        scales.append(engine.loss_scale)
    assert scales == [4.0, 2.0] and engine.skipped_steps == 2
    backward(engine, w=INF)
    with pytest.raises(oxizero.EngineError, match="lower the learning rate"):
        engine.step()
    assert masters(engine) == {"w": [1.0]}


@claims()
def scales_that_cannot_be_are_refused_by_field(at):
    for wrong, field in (
        ({"loss_scale": math.nan}, "fp16.loss_scale"),
        ({"loss_scale": INF}, "fp16.loss_scale"),
        ({"loss_scale": -1}, "fp16.loss_scale"),
        ({"initial_scale_power": -1}, "fp16.initial_scale_power"),
        ({"loss_scale_window": 0}, "fp16.loss_scale_window"),
        ({"loss_scale_window": math.nan}, "fp16.loss_scale_window"),
        ({"hysteresis": 0}, "fp16.hysteresis"),
        ({"min_loss_scale": -1}, "fp16.min_loss_scale"),
    ):
        with pytest.raises(oxizero.ConfigError, match=field.replace(".", r"\.")):
            at.start(Given(w=[0.0]), fp16={"enabled": True} | wrong)


@pytest.mark.parametrize("case", claims.cases())
def test_norms(case):
    claims.check(case)
