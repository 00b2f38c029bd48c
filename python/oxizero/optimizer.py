"""Torch's optimizers as the engine's: their groups are read at each step, their arithmetic is not
used."""

import torch

from oxizero._oxizero import ConfigError

_RULES = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}

# Options that change the result and that the engine does not have, with the value that it does.
_FIXED = {"amsgrad": False, "maximize": False, "dampening": 0, "differentiable": False}


def from_settings(settings, parameters):
    """The torch optimizer that a configuration's settings describe."""
    settings = dict(settings)
    kinds = {rule: kind for kind, rule in _RULES.items()}
    return kinds[settings.pop("rule")](parameters, **settings)


def check(client):
    """Refuses an optimizer that the engine does not have."""
    if type(client) not in _RULES:
        names = ", ".join(kind.__name__ for kind in _RULES)
        raise ConfigError(
            f"optimizer = {type(client).__name__} is refused: the engine has its own update of "
            f"each shard; use torch.optim's {names}"
        )
    for index, group in enumerate(client.param_groups):
        for option, works in _FIXED.items():
            if group.get(option, works) != works:
                raise ConfigError(
                    f"optimizer.param_groups[{index}][{option!r}] = {group[option]} is refused: "
                    f"the engine has no such update; use {works}"
                )


def groups(optimizer):
    """The groups of a torch optimizer, as the engine takes them."""
    return [_group(optimizer, group) for group in optimizer.param_groups]


def _group(optimizer, group):
    rule = "adamw" if group.get("decoupled_weight_decay") else optimizer.rule
    told = {"rule": rule, "lr": float(group["lr"]), "weight_decay": float(group["weight_decay"])}
    if rule == "sgd":
        return told | {"momentum": float(group["momentum"]), "nesterov": bool(group["nesterov"])}
    betas = tuple(float(beta) for beta in group["betas"])
    return told | {"betas": betas, "eps": float(group["eps"])}


class Optimizer(torch.optim.Optimizer):
    """What `initialize` returns: the client's groups, which torch's schedulers may change; a step
    is the engine's."""

    def __init__(self, client):
        check(client)
        self.rule = _RULES[type(client)]
        self.client = client
        self.engine = None
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
