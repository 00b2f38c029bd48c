"""Whole gradients, master weights and optimizer states, with DeepSpeed's names.

Every function is called by all ranks, for the same parameters in the same order. Gradients are
those of the whole window, averaged over ranks and micro-batches, unscaled, in the accumulation
dtype and before clipping; they are there between the window's last backward and its step, and an
error says so at another time. A parameter that no engine knows gives None, and so does a frozen
one.

Of a tensor that ranks hold in parts, whole is what this rank holds: the parameter, or the local
tensor of a DTensor. Other ranks of its group are given theirs.

The `local` functions are about the part of a parameter that this rank's optimizer updates, as a
flat tensor; it may be empty.
"""

import torch

from oxizero import registry
from oxizero._oxizero import EngineError
from oxizero.engine import Engine
from oxizero.leaves import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from oxizero.log import log_dist, logger
from oxizero.splits import local

__all__ = [
    "get_z3_leaf_modules",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_model_grads",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def safe_get_full_grad(param):
    """The whole gradient."""
    return _get(param, "full_grad")


def safe_set_full_grad(param, value):
    """Replaces the whole gradient."""
    _set(param, "set_full_grad", value)


def safe_get_full_model_grads(model, scope="local"):
    """The whole gradients of a model's trained parameters by name, with one collective for each
    group of ranks and dtype; a tied parameter has each of its names.

    Of a tensor that ranks hold in parts (see `oxizero.mark_split`), and of their own experts, each
    rank gets what it holds. With `scope="global"` all ranks get whole tensors: parts are joined,
    and experts stacked along a new first dimension.
    """
    if scope not in ("local", "global"):
        raise EngineError(f'scope = {scope!r}; there are "local" and "global"')
    module = model.module if isinstance(model, Engine) else model
    named = [
        (name, *found)
        for name, param in module.named_parameters(remove_duplicate=False)
        if (found := registry.find(param)) is not None
    ]
    grads = {core: None for _, core, _ in named}
    for core in grads:
        told = core.full_grads(scope == "global")
        grads[core] = [core.back_end.take(given) for given in told]
    return {
        name: grads[core][index] for name, core, index in named if grads[core][index] is not None
    }


def safe_get_full_fp32_param(param):
    """The whole master weights."""
    return _get(param, "full_param")


def safe_set_full_fp32_param(param, value):
    """Replaces the whole master weights, and the model's weights with them."""
    _set(param, "set_full_param", value)


def safe_get_full_optimizer_state(param, optim_state_key):
    """A whole optimizer state, such as `exp_avg`."""
    return _get(param, "full_state", optim_state_key)


def safe_set_full_optimizer_state(param, value, optim_state_key):
    """Replaces a whole optimizer state."""
    _set(param, "set_full_state", value, optim_state_key)


def safe_get_local_grad(param):
    """This rank's part of the gradient."""
    return _get_local(param, "local_grad")


def safe_set_local_grad(param, value):
    """Replaces this rank's part of the gradient."""
    _set(param, "set_local_grad", value)


def safe_get_local_fp32_param(param):
    """This rank's part of the master weights."""
    return _get_local(param, "local_param")


def safe_set_local_fp32_param(param, value):
    """Replaces this rank's part of the master weights, and the model's weights with them."""
    _set(param, "set_local_param", value)


def safe_get_local_optimizer_state(param, optim_state_key):
    """This rank's part of an optimizer state."""
    return _get_local(param, "local_state", optim_state_key)


def safe_set_local_optimizer_state(param, value, optim_state_key):
    """Replaces this rank's part of an optimizer state."""
    _set(param, "set_local_state", value, optim_state_key)


def _get(param, call, *key):
    found = registry.find(param)
    if found is None:
        return None
    core, index = found
    return core.back_end.take(getattr(core, call)(index, *key))


def _get_local(param, call, *key):
    found = registry.find(param)
    part = found and getattr(found[0], call)(found[1], *key)
    return None if part is None else found[0].back_end.take(part[1])


def _set(param, call, value, *key):
    found = registry.find(param)
    if found is not None:
        core, index = found
        # What is no dense tensor goes as it is: the engine refuses it on all ranks.
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        given = core.back_end.give(local(value)) if dense else value
        getattr(core, call)(index, *key, given)
        if call.endswith("_param"):
            registry.engine_of(param)._weights.wrote(index)
