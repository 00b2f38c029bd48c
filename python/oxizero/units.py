"""Which parameters are gathered together in stage 3: those that a module's forward uses."""

from dataclasses import dataclass, field

import torch

from oxizero.leaves import declare, z3_leaf_module


_EXTERNAL = "_oxizero_external"


@dataclass(eq=False)
class Unit:
    """A module whose hooks gather parameters."""

    name: str
    module: torch.nn.Module
    is_leaf: bool
    # All that it uses, tied ones and those of other modules too.
    params: list = field(default_factory=list)
    # Those that no unit before it holds.
    owned: list = field(default_factory=list)


def find(root, declared):
    """The units of a model, in the order of its modules.

    A module with a forward holds what it registers itself, and what modules below it do that have
    no forward, such as a ParameterList. A leaf holds everything below it; `declared` says which
    modules a configuration makes leaves.
    """
    declare(root, *declared)
    units, seen = [], set()

    def visit(name, module, holder):
        if module in seen:
            return
        seen.add(module)
        is_leaf = z3_leaf_module(module)
        if is_leaf or holder is None or _has_forward(module):
            holder = Unit(name, module, is_leaf)
            units.append(holder)
        holder.params += module.parameters(recurse=is_leaf)
        holder.owned += module.parameters(recurse=is_leaf)
        holder.params += external(module)
        if is_leaf:
            return
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child, holder)

    visit("", root, None)
    units = [unit for unit in units if unit.params]
    first = set()
    for unit in units:
        unit.owned = [param for param in unit.owned if id(param) not in first]
        first.update(map(id, unit.owned))
    return units


def numbers(units):
    """By id of a parameter: the number of the unit that owns it, among those that own any."""
    owners = [unit for unit in units if unit.owned]
    return {id(param): number for number, unit in enumerate(owners) for param in unit.owned}


def external(module):
    """The parameters of other modules that this one is known to use."""
    return getattr(module, _EXTERNAL, [])


def add_external(module, param):
    """This module uses that parameter."""
    if not any(known is param for known in external(module)):
        # A list in an attribute: torch takes a parameter itself for the module's own.
        setattr(module, _EXTERNAL, [*external(module), param])


def remove_external(module, param):
    """This module uses that parameter no longer."""
    setattr(module, _EXTERNAL, [known for known in external(module) if known is not param])


def _has_forward(module):
    return type(module).forward is not torch.nn.Module.forward
