"""Values as JSON from which they come back equal.

What JSON does not have, or would give back as something else, is an object with the key `$`, which
says what it is, and `of`; so is a dict with keys that begin so, which parsers may have a meaning
for. What cannot be told so is refused by its name.
"""

import collections
import json
import math
import types

import torch

from oxizero._oxizero import EngineError

_TAG = "$"
# Parsers of a manifest follow 128 levels, of which it has some of its own.
_LEVELS_MAX = 100
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def encoded(value, name):
    """A value, of which errors speak as `name`, as `json.dumps` takes it."""
    return _Writer(is_schedule=False).write(value, name)


def encoded_schedule(state, name):
    """The same of what a scheduler's `state_dict` holds: numbers may be tensors, as learning rates
    may, and functions are left out, which whoever makes the scheduler gives it again."""
    return _Writer(is_schedule=True).write(state, name)


def decoded(value):
    """The value that was encoded."""
    try:
        return _read(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"what the checkpoint has beside tensors is not what was saved: {error!r}"
        ) from error


class _Writer:
    def __init__(self, is_schedule):
        self._is_schedule = is_schedule

    def write(self, value, name, levels=0):
        if levels > _LEVELS_MAX:
            raise EngineError(f"{name} lies too deep in lists and dicts, or holds itself")
        if isinstance(value, str):
            return _text(value, name)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return value if _INT_MIN <= value <= _INT_MAX else _tagged("int", hex(value))
        if isinstance(value, float):
            return value if math.isfinite(value) else _tagged("float", repr(float(value)))
        if isinstance(value, (list, tuple)):
            inner = [self.write(one, f"{name}[{at}]", levels + 2) for at, one in enumerate(value)]
            return inner if isinstance(value, list) else _tagged("tuple", inner)
        if isinstance(value, dict):
            return self._dict(value, name, levels)
        if self._is_schedule and isinstance(value, torch.Tensor) and value.dim() == 0:
            dtype = str(value.dtype).removeprefix("torch.")
            return _tagged("tensor", [dtype, self.write(value.item(), name, levels + 2)])
        hint = ""
        if isinstance(value, torch.Tensor):
            hint = "; save it with torch.save, or make it a list with tolist()"
        raise EngineError(
            f"{name} is `{type(value).__name__}`; a checkpoint holds None, bools, numbers, texts, "
            f"lists, tuples and dicts of them{hint}"
        )

    def _dict(self, value, name, levels):
        is_counter = isinstance(value, collections.Counter)
        of = {
            key: self.write(one, self._name(name, key, levels), levels + 3)
            for key, one in value.items()
            if not (self._is_schedule and isinstance(one, _FUNCTIONS))
        }
        if not is_counter and all(isinstance(key, str) and not key.startswith(_TAG) for key in of):
            return {_text(key, f"a key of {name}"): one for key, one in of.items()}
        pairs = [[self.write(key, f"a key of {name}", levels + 3), one] for key, one in of.items()]
        return _tagged("counter" if is_counter else "dict", pairs)

    def _name(self, name, key, levels):
        if self._is_schedule and levels == 0:
            return f"{name}.{key}"
        return f"{name}[{json.dumps(key) if isinstance(key, str) else repr(key)}]"


def _tagged(kind, of):
    return {_TAG: kind, "of": of}


def _text(value, name):
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EngineError(f"{name} is a text that is no Unicode: {error}") from None
    return value


def _read(value):
    if isinstance(value, list):
        return [_read(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _read(one) for key, one in value.items()}
    return _KINDS[value[_TAG]](value["of"])


def _read_tensor(of):
    dtype = getattr(torch, of[0])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(of[0])
    return torch.tensor(_read(of[1]), dtype=dtype)


def _read_dict(of):
    return {_read(key): _read(one) for key, one in of}


_KINDS = {
    "int": lambda of: int(of, 16),
    "float": float,
    "tuple": lambda of: tuple(map(_read, of)),
    "dict": _read_dict,
    "counter": lambda of: collections.Counter(_read_dict(of)),
    "tensor": _read_tensor,
}
