"""Which parameters are gathered together in stage 3: those that a module's forward uses."""

from dataclasses import dataclass, field

import torch

from oxizero import leaves


@dataclass(eq=False)
class Unit:
    """A module whose hooks gather parameters, and these: its own and tied ones."""

    name: str
    module: torch.nn.Module
    is_leaf: bool
    params: list = field(default_factory=list)


def find(root):
    """The units of a model, in the order of its modules.

    A module with a forward holds what it registers itself, and what modules below it do that have
    no forward, such as a ParameterList. A leaf holds everything below it.
    """
    units, seen = [], set()

    def visit(name, module, holder):
        if module in seen:
            return
        seen.add(module)
        is_leaf = leaves.is_leaf(module)
        if is_leaf or holder is None or _has_forward(module):
            holder = Unit(name, module, is_leaf)
            units.append(holder)
        holder.params += module.parameters(recurse=is_leaf)
        if is_leaf:
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, holder)

    visit("", root, None)
    return [unit for unit in units if unit.params]


def numbers(units):
    """By id of a parameter: the index of the first unit that holds it, whose it is."""
    owners = {}
    for index, unit in enumerate(units):
        for param in unit.params:
            owners.setdefault(id(param), index)
    return owners


def _has_forward(module):
    return type(module).forward is not torch.nn.Module.forward
