"""DeepSpeed's schedules against their formulas, by hand and in an engine."""

import math

import pytest
import torch
from test_access import Constant
from test_engine import window

import oxizero
from oxizero import lr_schedules
from oxizero.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def optimizer(*lrs):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in lrs or (1.0,)]
    return torch.optim.AdamW(groups)


def rates(schedule, steps):
    """The first group's learning rate in each of so many steps."""
    lrs = []
    for _ in range(steps):
        lrs.append(schedule.optimizer.param_groups[0]["lr"])
        assert schedule.get_last_lr()[0] == lrs[-1]
        schedule.step()
    return lrs


def test_warmup_rises_and_stays():
    linear = WarmupLR(optimizer(), 0.0, 8.0, 4, "linear")
    assert rates(linear, 8) == [0.0, 0.0, 2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    log = WarmupLR(optimizer(), 1.0, 3.0, 4)
    expected = [1.0, *(1.0 + 2.0 * math.log(step + 1) / math.log(4) for step in range(4)), 3.0]
    assert rates(log, 6) == expected


def test_a_group_has_rates_of_its_own():
    groups = optimizer(0.5, 0.25)
    schedule = WarmupLR(groups, [0.0, 0.125], warmup_num_steps=2, warmup_type="linear")
    seen = []
    for _ in range(4):
        seen.append([group["lr"] for group in groups.param_groups])
        schedule.step()
    assert seen == [[0.0, 0.125], [0.0, 0.125], [0.25, 0.1875], [0.5, 0.25]]
    with pytest.raises(oxizero.ConfigError, match="warmup_min_lr has 3 values.*2 groups"):
        WarmupLR(optimizer(1.0, 1.0), [0.0, 0.0, 0.0])


def test_warmup_and_decay_end_at_zero():
    schedule = WarmupDecayLR(optimizer(), 6, 0.0, 4.0, 2, "linear")
    assert rates(schedule, 10) == [0.0, 0.0, 2.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0]


def test_warmup_and_cosine_scale_each_groups_own_rate():
    groups = optimizer(2.0, 1.0)
    schedule = WarmupCosineLR(groups, 6, 0.5, 2, 0.25, "linear")
    # Of the ratio: nothing, the smallest, half-way up, and four steps of a cosine's half.
    halves = [(1 + math.cos(math.pi * part / 4)) / 2 for part in (1, 2, 3, 4)]
    expected = [0.0, 0.5, 0.75, *(0.25 + 0.75 * half for half in halves), 0.25]
    assert rates(schedule, 8) == [2.0 * ratio for ratio in expected]
    assert groups.param_groups[1]["lr"] == 0.25


def test_a_range_test_rises_for_ever():
    assert rates(LRRangeTest(optimizer(), 1.0, 2, 3.0), 4) == [1.0, 2.5, 4.0, 5.5]
    assert rates(LRRangeTest(optimizer(), 1.0, 2, 3.0, True), 5) == [1.0, 1.0, 4.0, 4.0, 7.0]


def test_one_cycle_goes_up_and_down_and_decays():
    groups = optimizer()
    schedule = OneCycle(
        groups, 1.0, 9.0, 0.5, 4, 2, decay_step_size=1, cycle_min_mom=0.5, cycle_max_mom=0.75
    )
    assert groups.param_groups[0]["betas"] == (0.5, 0.99)
    seen = []
    for _ in range(8):
        schedule.step()
        seen.append((groups.param_groups[0]["lr"], groups.param_groups[0]["betas"][0]))
    up = [(3.0, 0.6875), (5.0, 0.625), (7.0, 0.5625), (9.0, 0.5)]
    assert seen == [*up, (5.0, 0.625), (1.0, 0.75), (1.0 / 1.5, 0.75), (1.0 / 2.0, 0.75)]


def test_one_cycle_in_stairs():
    schedule = OneCycle(optimizer(), 0.0, 4.0, 0.0, 4, cycle_first_stair_count=2)
    assert rates(schedule, 9) == [0.0, 0.0, 2.0, 2.0, 4.0, 2.0, 2.0, 0.0, 0.0]


def test_one_cycle_leaves_the_momentum_of_sgd_alone():
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.3)
    schedule = OneCycle(sgd, 1.0, 2.0)
    schedule.step()
    assert sgd.param_groups[0]["momentum"] == 0.3 and schedule.get_mom() is None


def test_a_schedule_goes_on_where_it_was():
    first = WarmupLR(optimizer(), 0.0, 8.0, 4, "linear")
    rates(first, 3)
    second = WarmupLR(optimizer(), 0.0, 8.0, 4, "linear")
    second.load_state_dict(first.state_dict())
    assert second.optimizer.param_groups[0]["lr"] == 4.0
    assert rates(second, 3) == rates(first, 3) == [4.0, 6.0, 8.0]


def test_a_rate_that_is_a_tensor_is_written_in_place():
    rate = torch.tensor(1.0)
    schedule = WarmupLR(optimizer(rate), 0.0, 8.0, 2, "linear")
    for _ in range(2):
        schedule.step()
    assert rate.item() == 4.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"warmup_num_steps": 0}, "warmup_num_steps = 0"), ({"warmup_type": "cubic"}, '"linear"')],
)
def test_what_is_no_schedule_is_refused(settings, said):
    with pytest.raises(oxizero.ConfigError, match=said):
        WarmupLR(optimizer(), **settings)


WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_max_lr": 4.0, "warmup_num_steps": 4, "warmup_type": "linear"},
}
SGD = {"type": "SGD", "params": {"lr": 1.0}}


def test_the_configurations_schedule_advances_with_applied_steps():
    config = {
        "optimizer": SGD,
        "scheduler": WARMUP,
        "fp16": {"enabled": True, "loss_scale": 1024},
        "gradient_accumulation_steps": 2,
    }
    engine, optimizer, _, scheduler = oxizero.initialize(model=Constant(1), config=config)
    assert isinstance(scheduler, lr_schedules.WarmupLR) and engine.lr_scheduler is scheduler
    # The first two steps have a rate of 0, as DeepSpeed's; a skipped one is none.
    for gradients, lr, weight in [
        ((1.0, 1.0), 0.0, 0.0),
        ((60000.0, 1.0), 0.0, 0.0),
        ((1.0, 1.0), 1.0, 0.0),
        ((1.0, 3.0), 2.0, -2.0),
        ((1.0, 1.0), 3.0, -4.0),
    ]:
        assert window(engine, *gradients) == [weight]
        assert engine.get_lr() == [lr] == scheduler.get_last_lr()
    assert engine.skipped_steps == 1 and scheduler.last_batch_iteration == 3


def test_a_cycled_momentum_is_the_engines_beta():
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 4}
    config = {
        "optimizer": {"type": "AdamW", "params": {"betas": [0.1, 0.2]}},
        "scheduler": {"type": "OneCycle", "params": params},
    }
    engine, *_ = oxizero.initialize(model=Constant(1), config=config)
    plain = Constant(1)
    reference = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)
    schedule = OneCycle(reference, **params)
    for gradient in (1.0, -2.0, 0.5, 3.0, -1.0):
        assert engine.get_mom() == [reference.param_groups[0]["betas"]]
        window(engine, gradient)
        plain(gradient).backward()
        reference.step()
        reference.zero_grad()
        schedule.step()
        torch.testing.assert_close(engine.module.weight, plain.weight, rtol=1e-5, atol=1e-6)


def test_a_schedule_for_a_metric_is_given_one():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    engine, *_ = oxizero.initialize(
        model=Constant(1),
        config={"optimizer": SGD},
        lr_scheduler=lambda optimizer: plateau(optimizer, factor=0.5, patience=0),
    )
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.ConfigError, match="lr_kwargs"):
        engine.step()
    engine.step(lr_kwargs={"metrics": 1.0})
    engine.backward(engine(1.0))
    engine.step(lr_kwargs={"metrics": 2.0})
    assert engine.get_lr() == [0.5] and engine.module.weight.tolist() == [-2.0]


def test_one_schedule_is_enough():
    config = {"optimizer": SGD, "scheduler": WARMUP}
    with pytest.raises(oxizero.ConfigError, match="`scheduler` too; leave one of the two out"):
        oxizero.initialize(model=Constant(1), config=config, lr_scheduler=WarmupLR)
    with pytest.raises(oxizero.ConfigError, match="`optimizer` too; leave one of the two out"):
        oxizero.initialize(model=Constant(1), config=config, optimizer=torch.optim.AdamW)
