"""A DeepSpeed ZeRO checkpoint as one of the engine's: `python -m oxizero.convert_deepspeed FOLDER
OUT`.

One process reads all files, mapped into memory, and writes one tensor after another: weights,
master weights, optimizer states, counts, the optimizer's settings, the loss scale, buffers. What
is in the files is read without running anything that they name.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from oxizero import _oxizero, optimizer
from oxizero._oxizero import EngineError
from oxizero.deepspeed_files import Files
from oxizero.encoding import encoded, encoded_schedule
from oxizero.model_files import described

_BLOCK_BYTES = 1 << 20
_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64",
}
# What the engine's groups have beside learning rate and weight decay.
_SETTINGS = ("betas", "eps", "momentum", "nesterov", "lr_decay", "initial_accumulator_value")


def convert(folder, out, tag=None):
    """Converts the checkpoint `tag` of `folder`, or the one that it says is the latest, or the
    folder itself, to one of the same name in `out`, which is the latest there. Returns its folder,
    and what is left out of the client state, or the scheduler's, for checkpoints do not hold
    it."""
    folder = Path(folder)
    if tag is None and (folder / "latest").is_file():
        tag = (folder / "latest").read_text(encoding="utf-8").strip()
    if tag is not None:
        folder = folder / tag
    files = Files(folder)
    tensors = _tensors(files)
    caller, left = _caller(files)
    manifest = {
        "block_bytes": _BLOCK_BYTES,
        "params": _params(files),
        "tensors": [tensor for tensor, _ in tensors],
        "training": _training(files),
        "caller": caller,
        "ranks": [],
    }

    def give(index):
        return described("", tensors[index][1]())[-1]

    written = _oxizero.write_checkpoint(
        os.fspath(out), folder.name, json.dumps(manifest), give
    )
    return Path(written), left


def _params(files):
    aliases = {}
    for alias, first in files.model["shared_params"].items():
        aliases.setdefault(first, []).append(alias)
    module, shapes = files.model["module"], files.shapes
    names = [name for name in module if name in shapes] + files.frozen
    return [
        {
            "name": name,
            "aliases": aliases.get(name, []),
            "dtype": _dtype(name, module[name]),
            "trainable": name in shapes,
            "updates": [files.steps(name) if name in shapes else 0],
        }
        for name in names
    ]


def _tensors(files):
    """What the manifest says of each tensor, and a function that returns it."""
    tensors = []

    def add(name, role, dtype, shape, read):
        shape = list(shape)
        told = {"name": name, "role": role, "shape": shape, "part_shape": shape, "dtype": dtype}
        tensors.append((told | {"pieces": []}, read))

    for name, shape in files.shapes.items():
        add(name, "master", "F32", shape, lambda name=name: files.master(name).float())
        for key in files.states(name):
            read = lambda name=name, key=key: files.state(name, key).float()  # noqa: E731
            add(name, {"state": key}, "F32", shape, read)
    for name in files.frozen:
        value = files.weights(name)
        add(name, "weights", _dtype(name, value), value.shape, lambda value=value: value)
    for name in files.model["buffer_names"]:
        value = files.model["module"][name]
        add(name, "buffer", _dtype(name, value), value.shape, lambda value=value: value)
    return tensors


def _dtype(name, tensor):
    if tensor.dtype not in _DTYPES:
        raise EngineError(f"`{name}` is {tensor.dtype}, which checkpoints do not hold")
    return _DTYPES[tensor.dtype]


def _training(files):
    scaler = files.loss_scaler
    is_dynamic = scaler.get("dynamic") and "cur_iter" in scaler
    # DeepSpeed counts the steps of which the last overflow was one.
    state = is_dynamic and {
        "scale": scaler["cur_scale"],
        "steps_since_overflow": max(scaler["cur_iter"] - scaler["last_overflow_iter"] - 1, 0),
        "overflows_left": max(scaler["cur_hysteresis"], 1),
    }
    return {
        "applied_steps": files.model["global_steps"] - files.model["skipped_steps"],
        "loss_scaler": state or None,
        "rule": "as it was in DeepSpeed, which does not say",
        "schedule": "",
        "groups": [
            {"lr": float(group["lr"]), "weight_decay": float(group.get("weight_decay", 0.0)),
             "rule": None}
            for group in files.groups
        ],
    }


def _caller(files):
    """What `load_checkpoint` takes beside the engine's own; and what is left out of it."""
    kept, left = {}, []
    for name, value in files.client_state.items():
        of = f"client_state[{json.dumps(name) if isinstance(name, str) else repr(name)}]"
        if _is_held(encoded, value, of):
            kept[name] = value
        else:
            left.append(of)
    scheduler = files.model["lr_scheduler"]
    if scheduler is not None and not _is_held(encoded_schedule, scheduler, "lr_scheduler"):
        scheduler = None
        left.append("lr_scheduler")
    counts = ("global_steps", "global_samples", "skipped_steps")
    caller = {
        "is_encoded": True,
        "client_state": encoded(kept, "client_state"),
        "groups": [
            {name: group[name] for name in ("lr", "weight_decay", *_SETTINGS) if name in group}
            for group in files.groups
        ],
        "scheduled": optimizer.scheduled(files.groups),
        "counts": {name: files.model[name] for name in counts if name in files.model},
        "lr_scheduler": None if scheduler is None else encoded_schedule(scheduler, "lr_scheduler"),
    }
    return caller, left


def _is_held(encode, value, name):
    try:
        encode(value, name)
    except EngineError:
        return False
    return True


def main(words=None):
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m oxizero.convert_deepspeed",
        description="Converts a DeepSpeed checkpoint of ZeRO stage 1, 2 or 3.",
    )
    parser.add_argument("folder", help="what save_checkpoint was given, or a checkpoint in it")
    parser.add_argument("out", help="what load_checkpoint is to be given")
    parser.add_argument("--tag", help="which checkpoint; the latest if absent")
    given = parser.parse_args(words)
    try:
        written, left = convert(given.folder, given.out, given.tag)
    except (EngineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(written)
    if left:
        names = ", ".join(left)
        print(f"left out, for checkpoints do not hold them: {names}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
