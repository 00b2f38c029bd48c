"""A model's buffers, and what else the engine does not hold: rank 0's are everybody's."""

import torch

from oxizero._oxizero import ConfigError
from oxizero.splits import local


def check(back_end, module, others):
    """The buffers, and `others`, that `broadcast` takes, by name; refuses what it cannot write."""
    devices = {"cpu", back_end.device.type}
    held = [
        (name, local(tensor))
        for name, tensor in [*module.named_buffers(), *others]
        if tensor.device.type in devices and tensor.numel() > 0
    ]
    for name, tensor in held:
        if tensor.layout != torch.strided or torch._debug_has_internal_overlap(tensor) == 1:
            raise ConfigError(
                f"buffer `{name}` is sparse, or its elements share memory (as after expand()), and "
                "cannot be overwritten with rank 0's; make it dense and contiguous"
            )
    return held


def broadcast(core, back_end, held):
    """Overwrites what `check` gave with rank 0's; a collective call."""
    core.agree([f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in held])
    copies = [tensor.detach().resolve_conj().resolve_neg().contiguous() for _, tensor in held]
    back_end.broadcast(core, copies, 0)
    for (_, tensor), copy in zip(held, copies, strict=True):
        if tensor.data_ptr() != copy.data_ptr() or tensor.is_conj() or tensor.is_neg():
            tensor.data.copy_(copy)
