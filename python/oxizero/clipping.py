"""Clipping of gradients that no parameter holds, and a warning to those who would clip nothing."""

import functools
import warnings
import weakref

import torch

from oxizero import registry

# Functions of torch.nn.utils that are given parameters and look at their `grad`.
_WATCHED = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_PLACES = (torch.nn.utils, torch.nn.utils.clip_grad)

_watchers = weakref.WeakSet()
_originals = {}
_has_warned = False


class Clipping:
    """What an engine has in place of torch.nn.utils.clip_grad_norm_."""

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Clips the window's gradients to a norm, that of all parameters and ranks together, and
        returns their norm before. Called by all ranks between the window's last backward and its
        step; `gradient_clipping` of the configuration clips in the step, what is left then.
        `norm_type` is 1, 2, 3 or inf. Gradients of a norm that is not finite stay as they are, and
        the step is skipped."""
        return torch.tensor(self._core.clip_grads(float(max_norm), float(norm_type)))


def watch(engine):
    """Has torch's functions say that they find no gradients in an engine's parameters."""
    if not _originals:
        for name in _WATCHED:
            for place in _PLACES:
                original = getattr(place, name, None)
                if original is not None:
                    _originals[place, name] = original
                    setattr(place, name, _watched(name, original))
    _watchers.add(engine)


def unwatch(engine):
    """The engine is no more; with the last one torch's functions are as they were."""
    _watchers.discard(engine)
    if _watchers:
        return
    for (place, name), original in _originals.items():
        # Whoever put another function in its place since wants that.
        if getattr(getattr(place, name), "_oxizero_watched", False):
            setattr(place, name, original)
    _originals.clear()


def _watched(name, original):
    @functools.wraps(original)
    def watched(parameters, *args, **kwargs):
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        _warn(name, [parameters] if isinstance(parameters, torch.Tensor) else parameters)
        return original(parameters, *args, **kwargs)

    watched._oxizero_watched = True
    return watched


def _warn(name, params):
    global _has_warned
    if _has_warned or not any(param.grad is None and registry.find(param) for param in params):
        return
    _has_warned = True
    warnings.warn(
        f"torch.nn.utils.{name} finds no gradients: the engine has them, and `param.grad` is None; "
        "call engine.clip_grad_norm_(max_norm) between backward and step, or set "
        "`gradient_clipping` in the configuration",
        stacklevel=3,
    )
