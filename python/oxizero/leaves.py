"""Leaf modules: in stage 3 gathered, released and reduced as a whole, whatever each rank uses of
them."""

import torch

_MARK = "_oxizero_leaf"

# Modules that use the parameters of modules below them without calling these.
_ALWAYS = (torch.nn.MultiheadAttention,)


def is_leaf(module):
    """Whether the module is one."""
    return getattr(module, _MARK, isinstance(module, _ALWAYS))
