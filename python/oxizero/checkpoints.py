"""Checkpoints of an engine: what DeepSpeed's methods of the same names save and load, in
oxizero's format, which any number of ranks and any stage loads."""

import json
import os

import torch

from oxizero import random_states
from oxizero._oxizero import EngineError
from oxizero.log import log_dist
from oxizero.model_files import described
from oxizero.optimizer import groups, take_settings

_COUNTS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


class Checkpoints:
    """Methods of the engine."""

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True):
        """Writes all that training goes on from to the folder `tag` of `save_dir`, and makes it the
        latest; a collective call, between a step and the next forward. `client_state` is what JSON
        holds, and rank 0's is kept. Returns True when the checkpoint is on the disk; until then
        the latest is the one before."""
        if not save_latest:
            raise EngineError(
                "save_checkpoint(save_latest=False) is not supported: every checkpoint that is "
                "saved is the latest; load another by its tag"
            )
        self._passes.check()
        (self._sharded or self._weights).take_over(self._core)
        settings = groups(self.optimizer)
        self._core.set_groups(settings)
        scheduler = self.lr_scheduler
        state = {
            "client_state": client_state or {},
            "groups": settings,
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "lr_scheduler": None if scheduler is None else _state(scheduler),
        }
        own = {"random": random_states.taken(self.device)}
        says = (_json(state), _json(own))
        buffers = [described(name, tensor) for name, tensor in _buffers(self.module)]
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._core.save_checkpoint(os.fspath(save_dir), name, says, buffers)
        return True

    def load_checkpoint(
        self,
        load_dir,
        tag=None,
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
    ):
        """Takes the state of a checkpoint of `load_dir`, of the latest if no `tag` says which,
        whatever the ranks and the stage that saved it; a collective call. A window that has begun
        is given up. Without optimizer states, or with `load_module_only`, weights alone are loaded,
        which master weights follow; else the settings of the optimizer's groups and the random
        states are loaded too, these where there were as many ranks.

        Returns the checkpoint's folder and the `client_state`; (None, {}) where there is no latest.
        """
        if tag is None and not os.path.isfile(os.path.join(load_dir, "latest")):
            log_dist(f"there is no latest checkpoint in `{load_dir}`; nothing is loaded", ranks=[0])
            return None, {}
        self.discard_window()
        (self._sharded or self._weights).take_over(self._core)
        name = None if tag is None else str(tag)
        what = "weights" if load_module_only or not load_optimizer_states else "all"
        told = self._core.load_checkpoint(os.fspath(load_dir), name, what, load_module_strict)
        self._weights.loaded(is_aliased=self._sharded is None)
        self._load_buffers(told["buffers"], load_module_strict)
        state = json.loads(told["caller"])
        if what == "all":
            self._resume(told, state)
        scheduler = self.lr_scheduler
        restores = load_lr_scheduler_states and not load_module_only
        if restores and scheduler is not None and state.get("lr_scheduler") is not None:
            scheduler.load_state_dict(state["lr_scheduler"])
        return str(told["folder"]), state.get("client_state", {})

    def _resume(self, told, state):
        """What goes on beside the engine. A run of the command line has said less of it."""
        known = [{"lr": lr, "weight_decay": decay} for lr, decay in told["groups"]]
        take_settings(self.optimizer, state.get("groups", known))
        self._core.set_groups(groups(self.optimizer))
        counts = state.get("counts", {"global_steps": self._core.applied_steps})
        for count in _COUNTS:
            setattr(self, count, counts.get(count, 0))
        own = json.loads(told["own"] or "null") or {}
        random_states.restore(own.get("random"), told["ranks"], self.world_size, self.device)

    def _load_buffers(self, stored, strict):
        own = dict(_buffers(self.module))
        differ = sorted(own.keys() ^ stored.keys())
        if strict and differ:
            raise EngineError(
                f"the model and the checkpoint differ in their buffers {', '.join(differ)}; pass "
                "load_module_strict=False to load the others"
            )
        for name in own.keys() & stored.keys():
            dtype, shape, values = stored[name]
            held = torch.frombuffer(bytearray(values), dtype=torch.uint8)
            held = held.view(getattr(torch, dtype)).reshape(shape)
            own[name].data.copy_(held)


def _state(scheduler):
    """A schedule's state without what is no state, such as functions."""
    state = scheduler.state_dict()
    return {name: value for name, value in state.items() if _is_json(value)}


def _is_json(value):
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _json(state):
    try:
        return json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EngineError(
            f"client_state holds something that is no JSON ({error}); save tensors with "
            "torch.save, or make them lists"
        ) from error


def _buffers(module):
    """The buffers that a module's `state_dict` has, each under its first name."""
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules()
        for name in inner._buffers.keys() - inner._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in module.named_buffers() if name in names]
