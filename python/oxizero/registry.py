"""Which engine holds a parameter: what `oxizero.utils` looks up."""

import weakref

from torch.utils.weak import WeakIdKeyDictionary

_engines = WeakIdKeyDictionary()


def add(engine, params):
    """These parameters are that engine's, in this order."""
    for index, param in enumerate(params):
        _engines[param] = (weakref.ref(engine), index)


def find(param):
    """The engine's core that holds the parameter, and the parameter's index there; None for one
    that no engine knows."""
    engine, index = _engines.get(param, (None, None))
    engine = engine and engine()
    return None if engine is None else (engine._core, index)
