"""DeepSpeed's schedules of the learning rate, by its names and with its parameters.

A schedule counts applied steps: `last_batch_iteration` is -1 before the first `step()`, 0 after it,
and so on. It sets what the optimizer's first step uses when it is made, and each `step()` sets what
the next one uses. Parameters said to be per group are a number, or a list of one for each of the
optimizer's groups. What else may be given is checked where a configuration is read.

Source: DeepSpeed 0.19, `runtime/lr_schedules.py`, whose numbers these are.
"""

import math

import torch

from oxizero._oxizero import ConfigError
from oxizero.log import logger
from oxizero.optimizer import set_options


class _Schedule:
    """What all schedules do: count, and set the groups' learning rates."""

    def __init__(self, optimizer, last_batch_iteration):
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        self._last_lr = [group["lr"] for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set()

    def get_lr(self):
        """The learning rates of the next step."""
        raise NotImplementedError

    def get_last_lr(self):
        """The learning rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration=None):
        """Another step was applied, or this one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set()

    def state_dict(self):
        """What `load_state_dict` takes."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict):
        """Goes on after the steps that were counted then."""
        self.step(state_dict["last_batch_iteration"])

    def _set(self):
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            set_options(group, {"lr": lr})

    def _each(self, name, value):
        return _per_group(self.optimizer, name, value)


class _Warmup(_Schedule):
    """A factor that rises from 0 to 1, and what follows."""

    def __init__(self, optimizer, warmup_num_steps, warmup_type, last_batch_iteration):
        if warmup_type not in ("log", "linear"):
            raise ConfigError(f'warmup_type = {warmup_type!r}; there are "log" and "linear"')
        if not isinstance(warmup_num_steps, int) or warmup_num_steps < 1:
            raise ConfigError(f"warmup_num_steps = {warmup_num_steps!r}; a whole number, 1 or more")
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def _factor(self):
        step = max(self.last_batch_iteration, 0)
        if step >= self.warmup_num_steps:
            return self._after_warmup()
        if self.warmup_type == "log":
            return math.log(step + 1) / math.log(self.warmup_num_steps)
        return step / self.warmup_num_steps

    def _after_warmup(self):
        return 1.0

    def _warn_of(self, total_num_steps):
        if total_num_steps < self.warmup_num_steps:
            logger.warning(
                "total_num_steps = %s ends before warmup_num_steps = %s",
                total_num_steps,
                self.warmup_num_steps,
            )


class WarmupLR(_Warmup):
    """Rises from `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps`, and stays there.

    `warmup_type` is "log" or "linear". Both rates are per group; without `warmup_max_lr` they rise
    to what the groups have.
    """

    def __init__(
        self,
        optimizer,
        warmup_min_lr=0.0,
        warmup_max_lr=None,
        warmup_num_steps=1000,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = _per_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _per_group(optimizer, "warmup_max_lr", warmup_max_lr)
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)

    def get_lr(self):
        factor = self._factor()
        return [
            low + (high - low) * factor
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]


class WarmupDecayLR(WarmupLR):
    """Rises as `WarmupLR`, and then falls in a straight line, to 0 at `total_num_steps`."""

    def __init__(
        self,
        optimizer,
        total_num_steps,
        warmup_min_lr=0.0,
        warmup_max_lr=0.001,
        warmup_num_steps=1000,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        self._warn_of(total_num_steps)

    def _after_warmup(self):
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Rises from `warmup_min_ratio` of each group's own rate to all of it, and falls in half a
    period of a cosine to `cos_min_ratio` of it at `total_num_steps`. The first step has a rate of
    0, whatever the ratios."""

    def __init__(
        self,
        optimizer,
        total_num_steps,
        warmup_min_ratio=0.0,
        warmup_num_steps=1000,
        cos_min_ratio=0.0001,
        warmup_type="log",
        last_batch_iteration=-1,
    ):
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warn_of(total_num_steps)

    def get_lr_ratio(self):
        """What the groups' own rates are multiplied by."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self._factor() * (1.0 - self.warmup_min_ratio)
        done = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, done / max(1, self.total_num_steps - self.warmup_num_steps))
        left = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * left)

    def get_lr(self):
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


class LRRangeTest(_Schedule):
    """Rises from `lr_range_test_min_lr` (per group) for ever, by `lr_range_test_step_rate` times
    that every `lr_range_test_step_size` steps: bit by bit, or with `lr_range_test_staircase` at
    once."""

    def __init__(
        self,
        optimizer,
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=2000,
        lr_range_test_step_rate=1.0,
        lr_range_test_staircase=False,
        last_batch_iteration=-1,
    ):
        self.min_lr = _per_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size < 1:
            raise ConfigError(
                f"lr_range_test_step_size = {lr_range_test_step_size!r}; a whole number, 1 or more"
            )
        self.step_size = lr_range_test_step_size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self):
        intervals = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            intervals = math.floor(intervals)
        return [lr * (1 + self.step_rate * intervals) for lr in self.min_lr]


class OneCycle(_Schedule):
    """Rises from `cycle_min_lr` to `cycle_max_lr` (per group) in `cycle_first_step_size` steps,
    falls back in `cycle_second_step_size` (as many, if it is not given), and then decays: every
    `decay_step_size` steps the divisor of the rate grows by `decay_lr_rate`.

    With `cycle_momentum` the first of Adam's betas goes the other way, from `cycle_max_mom` to
    `cycle_min_mom` (per group) and back, and then grows by `decay_mom_rate`; the second one is
    0.99. The very first step has `cycle_min_mom`. An optimizer without betas keeps its momentum.

    `cycle_first_stair_count` and `cycle_second_stair_count` cut a half of the cycle into so many
    steps; 0 for none.
    """

    def __init__(
        self,
        optimizer,
        cycle_min_lr,
        cycle_max_lr,
        decay_lr_rate=0.0,
        cycle_first_step_size=2000,
        cycle_second_step_size=None,
        cycle_first_stair_count=0,
        cycle_second_stair_count=None,
        decay_step_size=0,
        cycle_momentum=True,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
        decay_mom_rate=0.0,
        last_batch_iteration=-1,
    ):
        first, second = cycle_first_step_size, cycle_second_step_size
        self.first_step_size = float(first)
        self.second_step_size = float(first if second is None else second)
        if self.first_step_size <= 0 or self.second_step_size < 0:
            raise ConfigError(
                f"cycle_first_step_size = {first!r}, cycle_second_step_size = {second!r}; numbers "
                "of steps, the first of them 1 or more"
            )
        self.total_size = self.first_step_size + self.second_step_size
        self.stair_counts = [cycle_first_stair_count, cycle_second_stair_count]
        if cycle_second_stair_count is None:
            self.stair_counts[1] = cycle_first_stair_count
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = _per_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _per_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = _per_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _per_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and "betas" not in optimizer.defaults:
            logger.warning("OneCycle leaves the momentum alone: the optimizer has no betas")
            self.cycle_momentum = False
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self):
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        if self.last_batch_iteration < self.total_size:
            scale = self._scale()
            pairs = zip(self.min_lrs, self.max_lrs, strict=True)
            return [low + (high - low) * scale for low, high in pairs]
        divisor = 1 + self.decay_lr_rate * self._decay_intervals()
        return [lr / divisor for lr in self.min_lrs]

    def get_mom(self):
        """Adam's betas in the next step; None where the momentum is left alone."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < 0:
            moms = self.min_moms
        elif self.last_batch_iteration < self.total_size:
            scale = self._scale()
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            moms = [high - (high - low) * scale for low, high in pairs]
        else:
            factor = 1 + self.decay_mom_rate * self._decay_intervals()
            moms = [mom * factor for mom in self.max_moms]
        return [(mom, 0.99) for mom in moms]

    def _set(self):
        super()._set()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or ()):
            group["betas"] = betas

    def _scale(self):
        """How far the cycle is up: 0 to 1."""
        at = (self.last_batch_iteration + 1) % self.total_size
        rises = at <= self.first_step_size
        up, size = (
            (at, self.first_step_size) if rises else (self.total_size - at, self.second_step_size)
        )
        stairs = self.stair_counts[0 if rises else 1]
        return math.floor(up * stairs / size) / stairs if stairs > 0 else up / size

    def _decay_intervals(self):
        if self.decay_step_size == 0:
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


def _per_group(optimizer, name, value):
    count = len(optimizer.param_groups)
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} values, and the optimizer {count} groups")
    return list(value)


_NAMES = {
    schedule.__name__: schedule
    for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def from_settings(settings, optimizer):
    """The schedule that a configuration describes: its name, and the parameters it gives."""
    name, params = settings
    return _NAMES[name](optimizer, **params)


def check_metrics(scheduler, lr_kwargs):
    """Refuses a step whose schedule would not know what to do."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    if isinstance(scheduler, plateau) and "metrics" not in (lr_kwargs or {}):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric: call engine.step(lr_kwargs={'metrics': loss}), or "
            "do not give it to initialize() and step it yourself"
        )
