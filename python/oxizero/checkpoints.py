"""Checkpoints of an engine: what DeepSpeed's methods of the same names save and load, in
oxizero's format, which any number of ranks and any stage loads."""

import contextlib
import json
import os

import torch

from oxizero import random_states
from oxizero._oxizero import EngineError
from oxizero.data import Epochs
from oxizero.encoding import decoded, encoded, encoded_schedule
from oxizero.log import log_dist
from oxizero.model_files import described
from oxizero.optimizer import groups, scheduled, take_scheduled, take_settings
from oxizero.splits import local

_COUNTS = ("micro_steps", "global_steps", "global_samples", "skipped_steps")


class Checkpoints:
    """Methods of the engine."""

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True):
        """Writes all that training goes on from to the folder `tag` of `save_dir`, and makes it the
        latest; a collective call, between a step and the next forward. `client_state` holds None,
        bools, numbers, texts, lists, tuples and dicts of them; rank 0's is kept, and alone looked
        at. Returns True when the checkpoint is on the disk; until then the latest is the one
        before."""
        with self._alone("save"):
            if not save_latest:
                raise EngineError(
                    "save_checkpoint(save_latest=False) is not supported: every checkpoint that is "
                    "saved is the latest; load another by its tag"
                )
            self._passes.check()
            (self._sharded or self._weights).take_over(self._core)
            settings = groups(self.optimizer)
            self._core.set_groups(settings)
            state = self._state(client_state, settings) if self.global_rank == 0 else None
            own = {"random": random_states.taken(self.device)}
            says = (json.dumps(state, allow_nan=False), json.dumps(own, allow_nan=False))
            buffers = [described(name, tensor) for name, tensor in _buffers(self.module)]
            name = f"global_step{self.global_steps}" if tag is None else str(tag)
            folder = os.fspath(save_dir)
        self._core.save_checkpoint(folder, name, says, buffers)
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
        states are loaded too, these where there were as many ranks. With a scheduler's state comes
        what it reads in the groups: `lr`, and momentum or betas if it cycles them.

        Returns the checkpoint's folder and the `client_state`; (None, {}) where there is no latest.
        """
        with self._alone("load"):
            folder = os.fspath(load_dir)
        name = self._core.latest_checkpoint(folder) if tag is None else str(tag)
        if name is None:
            log_dist(f"there is no latest checkpoint in `{load_dir}`; nothing is loaded", ranks=[0])
            return None, {}
        with self._alone("load"):
            self.discard_window()
            (self._sharded or self._weights).take_over(self._core)
        what = "weights" if load_module_only or not load_optimizer_states else "all"
        found = _Found(self, load_module_strict)
        found.restores = load_lr_scheduler_states and not load_module_only
        self._core.load_checkpoint(folder, name, (what, load_module_strict), found.check)
        self._weights.loaded(is_aliased=self._sharded is None)
        for held, values in found.buffers:
            held.data.copy_(values)
        if what == "all":
            self._resume(found.told, found.state)
        if found.scheduler is not None:
            take_scheduled(self.optimizer, self.lr_scheduler, found.scheduled)
            self.lr_scheduler.load_state_dict(found.scheduler)
        return str(found.told["folder"]), found.client_state

    @contextlib.contextmanager
    def _alone(self, call):
        """What a rank does by itself before a collective call: if it fails, the others are told,
        and do not wait."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(EngineError):  # this rank's own reason is the best one
                self._core.refuse(call, f"{type(error).__name__}: {error}")
            raise

    def _state(self, client_state, settings):
        """What is the same on all ranks."""
        sampler, scheduler = self._sampler(), self.lr_scheduler
        if scheduler is not None:
            scheduler = encoded_schedule(scheduler.state_dict(), "lr_scheduler")
        return {
            "is_encoded": True,
            "client_state": encoded({} if client_state is None else client_state, "client_state"),
            "groups": settings,
            "scheduled": scheduled(self.optimizer.param_groups),
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "epoch": None if sampler is None else sampler.epoch,
            "lr_scheduler": scheduler,
        }

    def _resume(self, told, state):
        """What goes on beside the engine. A run of the command line has said less of it."""
        known = [{"lr": lr, "weight_decay": decay} for lr, decay in told["groups"]]
        take_settings(self.optimizer, state.get("groups", known))
        self._core.set_groups(groups(self.optimizer))
        counts = state.get("counts", {"global_steps": self._core.applied_steps})
        for count in _COUNTS:
            setattr(self, count, counts.get(count, 0))
        sampler = self._sampler()
        if sampler is not None and state.get("epoch") is not None:
            sampler.set_epoch(state["epoch"])
        own = json.loads(told["own"] or "null") or {}
        random_states.restore(own.get("random"), told["ranks"], self.world_size, self.device)

    def _sampler(self):
        sampler = getattr(self.training_dataloader, "sampler", None)
        return sampler if isinstance(sampler, Epochs) else None


class _Found:
    """What a checkpoint has beside the engine's own, which is looked at before anything is
    loaded."""

    def __init__(self, engine, strict):
        self._engine = engine
        self._strict = strict
        self.restores = True
        self.told, self.state, self.client_state = None, {}, {}
        self.buffers, self.scheduler, self.scheduled = [], None, []

    def check(self, told):
        """Takes it, or refuses it."""
        self.told, self.state = told, json.loads(told["caller"]) or {}
        is_encoded = self.state.get("is_encoded", False)
        client_state, scheduler = self.state.get("client_state", {}), None
        if self.restores and self._engine.lr_scheduler is not None:
            scheduler = self.state.get("lr_scheduler")
        if is_encoded:
            self.client_state, self.scheduler = decoded(client_state), decoded(scheduler)
        else:
            self.client_state, self.scheduler = client_state, _mended(scheduler)
        if self.scheduler is not None:
            self._check_groups()
        self._check_buffers()

    def _check_groups(self):
        self.scheduled = self.state.get("scheduled", self.state.get("groups", []))
        there, here = len(self.scheduled), len(self._engine.optimizer.param_groups)
        if there != here:
            raise EngineError(
                f"the checkpoint's scheduler is of {there} optimizer groups, and there are {here}; "
                "pass load_lr_scheduler_states=False"
            )

    def _check_buffers(self):
        own, stored = dict(_buffers(self._engine.module)), self.told["buffers"]
        differ = sorted(own.keys() ^ stored.keys())
        if self._strict and differ:
            raise EngineError(
                f"the model and the checkpoint differ in their buffers {', '.join(differ)}; pass "
                "load_module_strict=False to load the others"
            )
        for name in sorted(own.keys() & stored.keys()):
            self.buffers.append((own[name], _values(name, own[name], *stored[name])))


def _values(name, held, dtype, shape, elements):
    """A stored buffer, if it is one for the place where it is `held`."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise EngineError(f"buffer `{name}` is {dtype} in the checkpoint, which torch has not")
    if tuple(shape) != tuple(held.shape):
        raise EngineError(
            f"buffer `{name}` has the shape {list(shape)} in the checkpoint, and "
            f"{list(held.shape)} here"
        )
    if torch._debug_has_internal_overlap(local(held)) == 1:
        raise EngineError(
            f"buffer `{name}`: its elements share memory (as after expand()), and cannot be "
            "overwritten; make it contiguous"
        )
    if not elements:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(elements, dtype=torch.uint8).view(kind).reshape(shape)


def _mended(state):
    """A scheduler's state that was saved before milestones kept their kind: plain JSON, whose keys
    are texts. The scheduler has its own milestones, which are the same."""
    if isinstance(state, dict):
        return {
            key: _mended(value)
            for key, value in state.items()
            if not (key == "milestones" and isinstance(value, dict))
        }
    return [_mended(one) for one in state] if isinstance(state, list) else state


def _buffers(module):
    """The buffers that a module's `state_dict` has, each under its first name."""
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules()
        for name in inner._buffers.keys() - inner._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in module.named_buffers() if name in names]
