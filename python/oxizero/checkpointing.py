"""Activation checkpointing, with DeepSpeed's calls, by torch's own."""

import json

import torch.utils.checkpoint

from oxizero import _oxizero, configuration

_is_configured = False


def checkpoint(function, *args, **kwargs):
    """Calls the function, and again in backward, instead of keeping what it calculated."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def configure(
    mpu_=None,
    deepspeed_config=None,
    partition_activations=None,
    contiguous_checkpointing=None,
    num_checkpoints=None,
    checkpoint_in_cpu=None,
    synchronize=None,
    profile=None,
):
    """Checks what is asked for: the section `activation_checkpointing` of a configuration (a dict,
    or the path of a JSON file), and the arguments, which come first. Each is refused by name if
    there is no such thing. `mpu_` says nothing: activations are whole on every rank."""
    global _is_configured
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = _section(deepspeed_config)
    section |= {name: value for name, value in given.items() if value is not None}
    _oxizero.Config(json.dumps({"activation_checkpointing": section}), 1)
    _is_configured = True


def is_configured():
    """Whether `configure` was called."""
    return _is_configured


def reset():
    """Frees nothing: torch frees what backward has used."""


def _section(config):
    if config is None:
        return {}
    return dict(configuration.fields(config).get("activation_checkpointing") or {})
