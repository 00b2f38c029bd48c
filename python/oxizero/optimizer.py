"""Torch's optimizers as the engine's: their groups are read at each step, their arithmetic is not
used."""

import torch

from oxizero._oxizero import ConfigError
from oxizero.ops.adagrad import DeepSpeedCPUAdagrad
from oxizero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from oxizero.ops.lion import DeepSpeedCPULion, FusedLion

# The first of each rule is the one that is made of a configuration's settings.
_RULES = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    FusedLion: "lion",
    FusedAdam: "adam",
    DeepSpeedCPUAdam: "adam",
    DeepSpeedCPULion: "lion",
    DeepSpeedCPUAdagrad: "adagrad",
}

# Options of a rule, beside learning rate and weight decay.
_OPTIONS = {
    "adamw": ("betas", "eps"),
    "adam": ("betas", "eps"),
    "sgd": ("momentum", "nesterov"),
    "lion": ("betas",),
    "adagrad": ("lr_decay", "initial_accumulator_value", "eps"),
}

# What schedulers change beside the learning rate, and what they keep in the groups for themselves.
_MOMENTA = ("momentum", "betas")
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")

# Options that change the result and that the engine does not have, with the value that it does.
_FIXED = {"amsgrad": False, "maximize": False, "dampening": 0, "differentiable": False}


def from_settings(settings, parameters):
    """The torch optimizer that a configuration's settings describe."""
    settings = dict(settings)
    rule = settings.pop("rule")
    kind = next(kind for kind, known in _RULES.items() if known == rule)
    return kind(parameters, **settings)


def check(client):
    """Refuses an optimizer that the engine does not have."""
    if type(client) not in _RULES:
        names = ", ".join(f"{kind.__module__}.{kind.__name__}" for kind in _RULES)
        raise ConfigError(
            f"optimizer = {type(client).__name__} is refused: the engine has its own update of "
            f"each shard; use one of {names}"
        )
    if any(state.get("step", 1) != 0 for state in client.state.values()):
        raise ConfigError(
            "the optimizer has stepped, and the engine starts with states of its own; give "
            "initialize() a new one, and write states with oxizero.utils.safe_set_full_"
            "optimizer_state"
        )


def groups(optimizer):
    """The groups of a torch optimizer, as the engine takes them; refused where the engine has no
    such update."""
    if [len(group["params"]) for group in optimizer.client.param_groups] != optimizer.sizes:
        raise ConfigError(
            "the optimizer has other parameters than in initialize(), which the engine does not "
            "train; give all groups to initialize()"
        )
    return [_group(optimizer, index, group) for index, group in enumerate(optimizer.param_groups)]


def take_settings(optimizer, settings):
    """Gives the groups what `groups` told of others, as torch's `load_state_dict` does; of another
    rule's groups, learning rate and weight decay alone."""
    for index, (group, told) in enumerate(zip(optimizer.param_groups, settings)):
        own = _group(optimizer, index, group)
        is_other = told.get("rule", own["rule"]) != own["rule"]
        names = ("lr", "weight_decay") if is_other else told.keys() & own.keys() - {"rule"}
        # None is a momentum of which no buffer is kept.
        set_options(group, {name: told[name] for name in names if told[name] is not None})


def scheduled(param_groups):
    """What torch's schedulers keep in an optimizer's groups, and read there."""
    names = ("lr", *_MOMENTA, *_OF_SCHEDULERS)
    return [
        {name: _plain(group[name]) for name in names if name in group} for group in param_groups
    ]


def take_scheduled(optimizer, scheduler, scheduled):
    """Gives the groups what the scheduler, which goes on from another's state, is to find there."""
    is_of_momentum = getattr(scheduler, "cycle_momentum", False)
    names = ("lr", *(_MOMENTA if is_of_momentum else ()), *_OF_SCHEDULERS)
    for group, told in zip(optimizer.param_groups, scheduled):
        set_options(group, {name: told[name] for name in names if name in told and name in group})


def set_options(group, told):
    """Sets some of a group's hyper-parameters, in the tensors that it has them in."""
    for name, value in told.items():
        if isinstance(group[name], torch.Tensor):
            group[name].fill_(value)
        else:
            group[name] = tuple(value) if name == "betas" else value


def _group(optimizer, index, group):
    for option, works in _FIXED.items():
        if group.get(option, works) != works:
            raise ConfigError(
                f"optimizer.param_groups[{index}][{option!r}] = {group[option]} is refused: "
                f"the engine has no such update; use {works}"
            )
    rule = "adamw" if group.get("decoupled_weight_decay") else optimizer.rule
    told = {name: _plain(group[name]) for name in ("lr", "weight_decay", *_OPTIONS[rule])}
    if rule == "sgd" and not optimizer.keeps_buffer:
        if told["momentum"] != 0:
            raise ConfigError(
                f"optimizer.param_groups[{index}]['momentum'] = {told['momentum']}: no group had a "
                "momentum in initialize(), so that no buffer is kept; give one a momentum there"
            )
        told["momentum"] = None
    return told | {"rule": rule}


def _plain(value):
    """What may be tensors as numbers."""
    if isinstance(value, (list, tuple)):
        return tuple(float(number) for number in value)
    return value if isinstance(value, bool) else float(value)


class Optimizer(torch.optim.Optimizer):
    """What `initialize` returns: the client's groups, which torch's schedulers may change; a step
    is the engine's."""

    def __init__(self, client):
        check(client)
        self.rule = _RULES[type(client)]
        self.keeps_buffer = any(group.get("momentum") for group in client.param_groups)
        client.state.clear()  # Adagrad's are there from the start
        self.sizes = [len(group["params"]) for group in client.param_groups]
        self.client = client
        self.engine = None
        # Whoever steps the client's own means the engine.
        self._of_client = {name: vars(client).get(name) for name in ("step", "zero_grad")}
        client.step, client.zero_grad = self._stepper(), self.zero_grad
        # The dicts of the groups are shared with the client's, for schedulers that were made of it.
        super().__init__(client.param_groups, client.defaults)

    def step(self, closure=None):
        """The same as `engine.step()`."""
        if closure is not None:
            raise ConfigError("step(closure) is refused: a step updates what backward has given")
        self.engine.step()

    def zero_grad(self, set_to_none=True):
        """The same as `engine.zero_grad()`."""
        self.engine.zero_grad()

    def _stepper(self):
        def step(closure=None):
            self.step(closure)

        # What torch's schedulers leave on a step that they watch.
        step._wrapped_by_lr_sched = True
        return step

    def release(self):
        """Leaves the client a torch optimizer like any other."""
        for name, own in self._of_client.items():
            delattr(self.client, name)
            if own is not None:
                setattr(self.client, name, own)

    def stepped(self):
        """The engine has applied a step: torch's schedulers look whether one was."""
        self._opt_called = self.client._opt_called = True

    def add_param_group(self, param_group):
        if getattr(self, "engine", None) is not None:
            raise ConfigError("add_param_group is refused: give all groups to initialize()")
        super().add_param_group(param_group)

    def state_dict(self):
        raise NotImplementedError(
            "optimizer states are sharded; read them with oxizero.utils.safe_get_full_"
            "optimizer_state"
        )

    def load_state_dict(self, state_dict):
        raise NotImplementedError(
            "optimizer states are sharded; write them with oxizero.utils.safe_set_full_"
            "optimizer_state"
        )
