"""Tensors inside of what a module takes and returns."""

import copy
import dataclasses
from collections.abc import Mapping

import torch


def leaves(value):
    """What tuples, lists, mappings and dataclasses hold, however deep."""
    if isinstance(value, (tuple, list)):
        inner = value
    elif isinstance(value, Mapping):
        inner = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        inner = [getattr(value, name) for name in names if hasattr(value, name)]
    else:
        yield value
        return
    for item in inner:
        yield from leaves(item)


def mapped(value, change):
    """The same value, but for tensors for which `change` gives another; what holds these is copied.
    It looks into tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        changed = change(value)
        return value if changed is None else changed
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: mapped(item, change) for key, item in value.items()}
        changes = {key: item for key, item in pairs.items() if item is not value[key]}
        if not changes:
            return value
        value = copy.copy(value)
        for key, item in changes.items():
            value[key] = item
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        old = {name: getattr(value, name) for name in names}
        changes = {name: mapped(item, change) for name, item in old.items()}
        changes = {name: item for name, item in changes.items() if item is not old[name]}
        if not changes:
            return value
        value = copy.copy(value)
        for name, item in changes.items():
            object.__setattr__(value, name, item)  # a frozen one too
        return value
    return value
