"""Which engine holds a parameter: what `oxizero.utils` looks up."""

import atexit
import contextlib
import gc
import itertools
import os
import weakref

from torch.utils.weak import WeakIdKeyDictionary

from oxizero._oxizero import ConfigError

_engines = WeakIdKeyDictionary()
# By parameter: how many engines there were before its own, and its index there.
_places = WeakIdKeyDictionary()
_numbers = itertools.count()
_alive = weakref.WeakSet()
_kept = []


def _keep():
    """A fork, such as a worker of a data loader, has the engine's objects but is no rank: were they
    freed there, the rank would have left the world."""
    _kept.extend(engine._core for engine in _alive)


os.register_at_fork(after_in_child=_keep)


@atexit.register
def _settle():
    """Operations on a communication thread end before the interpreter does, which they call."""
    for engine in list(_alive):
        with contextlib.suppress(Exception):
            engine._core.settle()


def add(engine, params):
    """These parameters are that engine's, in this order."""
    _alive.add(engine)
    number = next(_numbers)
    for index, param in enumerate(params):
        _engines[param] = (weakref.ref(engine), index)
        _places[param] = (number, index)


def find(param):
    """The engine's core that holds the parameter, and the parameter's index there; None for one
    that no engine knows."""
    engine, index = _engines.get(param, (None, None))
    engine = engine and engine()
    return None if engine is None else (engine._core, index)


def engine_of(param):
    """The engine that holds the parameter, if one does."""
    engine, _ = _engines.get(param, (None, None))
    return engine and engine()


def place_of(param):
    """By what to sort parameters that engines hold, so that all ranks have the same order."""
    return _places[param]


def check_free(module):
    """Refuses a model of which an engine holds a parameter."""
    held = [name for name, param in module.named_parameters() if find(param) is not None]
    if held:
        gc.collect()  # an engine and its optimizer know each other
        held = [name for name, param in module.named_parameters() if find(param) is not None]
    if held:
        raise ConfigError(
            f"parameter `{held[0]}` is another engine's; call its destroy(), or initialize one "
            "engine for all that is trained"
        )


def remove(params):
    """These parameters are no engine's any more."""
    for param in params:
        _engines.pop(param, None)
        _places.pop(param, None)
