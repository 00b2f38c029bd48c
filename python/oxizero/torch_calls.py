"""torch's calls that look for gradients or weights in parameters, where engines have them:
`zero_grad` of a module means the engine's, one that converts weights is refused, and who would clip
or measure nothing is warned."""

import functools
import warnings
import weakref

import torch

from oxizero import registry
from oxizero._oxizero import EngineError

# Functions of torch.nn.utils that are given parameters and look at their `grad`.
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_PLACES = (torch.nn.utils, torch.nn.utils.clip_grad)

_watchers = weakref.WeakSet()
_originals = {}
_has_warned = False


class TorchCalls:
    """What an engine has in place of torch's calls."""

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Clips the window's gradients to a norm, that of all parameters and ranks together, and
        returns their norm before. Called by all ranks between the window's last backward and its
        step; `gradient_clipping` of the configuration clips in the step, what is left then.
        `norm_type` is 1, 2, 3 or inf. Gradients of a norm that is not finite stay as they are, and
        the step is skipped."""
        return torch.tensor(self._core.clip_grads(float(max_norm), float(norm_type)))


def watch(engine):
    """Has torch's calls know of an engine's gradients."""
    if not _originals:
        for name in _CLIPPING:
            for place in _PLACES:
                _replace(place, name, _warning)
        for place in _PLACES:
            _replace(place, "get_total_norm", _measuring)
        _replace(torch.nn.Module, "zero_grad", _zeroing)
        _replace(torch.nn.Module, "_apply", _converting)
    _watchers.add(engine)


def _replace(place, name, made):
    original = getattr(place, name, None)
    if original is not None:
        _originals[place, name] = original
        setattr(place, name, made(name, original))
        getattr(place, name)._oxizero_watched = True


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


def _zeroing(_, original):
    @functools.wraps(original)
    def zero_grad(module, set_to_none=True):
        original(module, set_to_none)
        params = set(map(id, module.parameters()))
        for engine in list(_watchers):
            engine.zero_grads_of(params)

    return zero_grad


def _converting(_, original):
    @functools.wraps(original)
    def _apply(module, fn, recurse=True):
        for name, param in module.named_parameters(recurse=recurse):
            if registry.find(param) is None:
                continue
            probe = torch.empty(1, dtype=param.dtype, device=param.device)
            if fn(probe) is not probe:
                raise EngineError(
                    f"parameter `{name}` is the engine's, and cannot get another dtype or device, "
                    "by half(), to() or the like; convert the model before initialize()"
                )
        return original(module, fn, recurse)

    return _apply


def _warning(name, original):
    @functools.wraps(original)
    def watched(parameters, *args, **kwargs):
        if not isinstance(parameters, torch.Tensor):
            parameters = list(parameters)
        params = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        if any(param.grad is None and registry.find(param) for param in params):
            _warn(name)
        return original(parameters, *args, **kwargs)

    return watched


def _measuring(name, original):
    @functools.wraps(original)
    def watched(tensors, *args, **kwargs):
        if not isinstance(tensors, torch.Tensor):
            tensors = list(tensors)
            if not tensors and any(engine.has_grads for engine in _watchers):
                _warn(name)
        return original(tensors, *args, **kwargs)

    return watched


def _warn(name):
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        f"torch.nn.utils.{name} finds no gradients: the engine has them, and `param.grad` is None; "
        "call engine.clip_grad_norm_(max_norm) between backward and step, or set "
        "`gradient_clipping` in the configuration; get_global_grad_norm() is a step's norm",
        stacklevel=3,
    )
