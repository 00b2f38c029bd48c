"""Leaf modules: in stage 3 gathered, released and reduced as a whole, whatever each rank uses of
them."""

import torch

from oxizero import registry
from oxizero._oxizero import ConfigError

_MARK = "_oxizero_leaf"

# Modules that use the parameters of modules below them without calling these.
_ALWAYS = (torch.nn.MultiheadAttention,)


def z3_leaf_module(model):
    """Whether the module is a leaf."""
    return getattr(model, _MARK, isinstance(model, _ALWAYS))


def get_z3_leaf_modules(model):
    """The leaves in a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model, flag):
    """Makes a module a leaf (`flag=True`), or none; before `initialize`."""
    held = [name for name, param in model.named_parameters() if registry.find(param) is not None]
    if held:
        raise ConfigError(
            f"`{held[0]}` is an engine's already; declare leaf modules before initialize()"
        )
    setattr(model, _MARK, bool(flag))


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Makes the modules of these classes leaves, and returns them: modules of which ranks may use
    different parts, such as experts. A class may be given by its name, with or without that of its
    Python module."""
    return _set(model, lambda _, module: _is_one(module, leaf_module_classes), True,
                leaf_module_classes if raise_if_not_found else None)


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Makes the modules of these classes leaves no longer, and returns them."""
    return _set(model, lambda _, module: _is_one(module, leaf_module_classes), False,
                leaf_module_classes if raise_if_not_found else None)


def set_z3_leaf_modules_by_name(model, module_names, raise_if_not_found=True):
    """Makes the modules of these names leaves, and returns them."""
    return _set(model, lambda name, _: name in module_names, True,
                module_names if raise_if_not_found else None)


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, raise_if_not_found=True):
    """Makes the modules whose names end so leaves, and returns them."""
    suffixes = tuple(module_name_suffixes)
    return _set(model, lambda name, _: name.endswith(suffixes), True,
                suffixes if raise_if_not_found else None)


def declare(model, classes, names, suffixes):
    """Makes leaves of what a configuration declares."""
    if classes:
        set_z3_leaf_modules(model, classes)
    if names:
        set_z3_leaf_modules_by_name(model, names)
    if suffixes:
        set_z3_leaf_modules_by_suffix(model, suffixes)


def _set(model, wanted, flag, asked):
    found = [module for name, module in model.named_modules() if wanted(name, module)]
    if not found and asked is not None:
        raise ConfigError(f"no module of {type(model).__name__} is one of {list(asked)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_one(module, classes):
    kind = type(module)
    names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return any(kind is asked or asked in names for asked in classes)
