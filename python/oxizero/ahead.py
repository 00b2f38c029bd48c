"""Gathers that are started while the module before computes, where these run beside it.

Which module comes after which two is known from the last time that these came. What is started, and
when, follows from the modules that have come alone, which are the same on all ranks.
"""

import contextlib
import enum

import torch

from oxizero._oxizero import EngineError

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class Way(enum.Enum):
    """How a module is run: evaluation goes on to other modules than training."""

    FORWARD = enum.auto()
    EVALUATION = enum.auto()
    BACKWARD = enum.auto()


class Ahead:
    """The weights that are gathered ahead: those of the next module that has any to gather, while a
    forward or a backward is under way.

    They are at most `numel_max` elements, 0 for nothing ahead, and nothing is gathered ahead that
    would make more than `live_numel_max` elements whole at once.
    """

    def __init__(self, buckets, numel_max, live_numel_max):
        self._buckets, self._numel_max, self._live_numel_max = buckets, numel_max, live_numel_max
        self._is_bounded = sum(bucket.numel for bucket in buckets) > live_numel_max
        # By the last two that came: the one that came after them. Units are known by number.
        self._next = {}
        self._buckets_of = {}
        self._last = (None, None)
        self._started = []
        self._units = 0
        # Calls of modules that are under way in forward.
        self._depth = 0

    def count(self):
        """The number of one unit more."""
        self._units += 1
        return self._units

    def forward(self, uses):
        """A unit's module is called, and its weights are whole; `left` says when it returns."""
        self._depth += 1
        if self._numel_max > 0:
            self._come(uses, Way.FORWARD if torch.is_grad_enabled() else Way.EVALUATION)

    def entered(self):
        """The model is called."""
        self._depth += 1

    def left(self):
        """The module, or the model, has returned. Between forward and backward nothing is whole."""
        self._depth -= 1
        if self._depth == 0 and torch._C._current_graph_task_id() == -1:
            self.end()

    def backward(self, uses):
        """Backward comes to a call of a unit, and its weights are whole."""
        if self._numel_max > 0:
            _queue_callback(self.end)
            self._come(uses, Way.BACKWARD)

    def end(self):
        """A forward or a backward has ended: what comes next, nobody knows."""
        started, self._started = self._started, []
        self._last = (None, None)
        self._drop(started)

    def reset(self):
        """Nothing is under way, whether it has ended well or not."""
        self._depth = 0
        with contextlib.suppress(EngineError):  # whoever failed has said why
            self.end()

    def _come(self, uses, way):
        came = (uses.number, way)
        self._buckets_of[uses.number] = uses.buckets
        self._next[self._last] = came
        self._last = (self._last[1], came)
        wanted = self._wanted()
        self._drop([bucket for bucket in self._started if bucket not in wanted])
        try:
            for bucket in wanted:
                bucket.start()
        except EngineError as error:
            error.add_note(
                f"Module `{uses.name}` was to run, and the weights of the next one were gathered "
                "ahead: ranks may have come to other modules at either."
            )
            raise
        self._started = wanted

    def _wanted(self):
        """What the next module that has anything to gather needs; nothing if that is too much."""
        pair, seen = self._last, set()
        while pair in self._next and pair not in seen:
            seen.add(pair)
            following = self._next[pair]
            missing = (bucket for bucket in self._buckets_of[following[0]] if not bucket.is_held())
            wanted = [bucket for bucket in missing if bucket.numel > 0]
            if wanted:
                return wanted if self._fits(wanted) else []
            pair = (pair[1], following)
        return []

    def _fits(self, wanted):
        numel = sum(bucket.numel for bucket in wanted)
        if self._is_bounded:
            live = sum(bucket.numel for bucket in self._buckets if bucket.is_held())
            return numel <= self._numel_max and live + numel <= self._live_numel_max
        return numel <= self._numel_max

    def _drop(self, buckets):
        for bucket in buckets:
            bucket.drop()
