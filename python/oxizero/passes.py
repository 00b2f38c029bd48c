"""When backward passes begin, end and fail: whether a window's gradients are complete."""

import enum

import torch
from torch.utils._pytree import tree_leaves

from oxizero._oxizero import EngineError

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class State(enum.Enum):
    """What a window's gradients wait for."""

    # Nothing: no pass runs.
    BETWEEN = enum.auto()
    # The end of the backward that gave the pass its first gradient.
    RUNNING = enum.auto()
    # The end of `Engine.backward`, whatever runs within it.
    DRIVEN = enum.auto()
    # To be given up: a pass has failed, and they are not complete.
    FAILED = enum.auto()


class Passes:
    """The backward passes since the last step.

    A pass begins with its first gradient. It ends when backward returns, or when a parameter gives
    another gradient, as one does that two re-entrant checkpoints use: each runs a backward of its
    own within backward. Only of those that `Engine.backward` runs is it known which is the
    outermost; else a pass ends with the one that began it.
    """

    def __init__(self):
        self._state = State.BETWEEN
        # Whether a pass has ended since the last step.
        self.has_ended = False
        # The parameters that have given their gradients to the pass; none before it begins.
        self._arrived = set()
        # What the gradients of the running backward are multiplied by; None for nothing.
        self._scale = None
        # The backwards that have reached what the model returned, and have not ended.
        self._open = set()

    @property
    def scale(self):
        """What the gradients of the running backward are multiplied by."""
        return 1.0 if self._scale is None else self._scale

    @property
    def is_idle(self):
        """Whether no gradient has come since the last step."""
        return self._state is State.BETWEEN and not self.has_ended

    def scaled(self, scale):
        """Gradients are multiplied by `scale` until the backward that now runs returns."""
        self._scale = scale
        _queue_callback(self._unscaled)

    def watch(self, returned):
        """Takes note of each backward that reaches what the model's forward returned.

        It is the outermost, whose failure would go unnoticed where segments of re-entrant
        checkpoints are passes by themselves, and end well.
        """
        for tensor in tree_leaves(returned):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._opened)

    def check(self):
        """Refuses to go on with gradients that are not complete."""
        if self._state is State.FAILED:
            raise EngineError(
                "a backward pass has failed, and the window's gradients are not complete; give "
                "them up with engine.discard_window() on all ranks"
            )

    def drive(self):
        """`Engine.backward` begins."""
        self.check()
        self._state = State.DRIVEN

    def returned(self):
        """`Engine.backward` has run to its end."""
        self._state = State.BETWEEN

    def failed(self, is_reduced):
        """`Engine.backward` has failed; `is_reduced` if a part of its gradients may have been
        reduced, whether one had come or not."""
        is_lost = is_reduced or bool(self._arrived)
        self._leave(State.FAILED if is_lost else State.BETWEEN)

    def settle(self):
        """No backward runs now; whether one has failed that nobody told of."""
        if torch._C._current_graph_task_id() != -1:
            return False
        is_left = bool(self._arrived or self._open) or self._scale is not None
        if is_left:
            self._give_up()
        return is_left

    def arrive(self, index, core, end):
        """A gradient of a parameter comes; `end` ends the pass."""
        if index in self._arrived:
            end()
        if not self._arrived:
            self._begin(core, end)
        self._arrived.add(index)

    def ended(self):
        """The pass has no more gradients."""
        self._arrived.clear()
        self.has_ended = True
        if self._state is State.RUNNING:
            self._state = State.BETWEEN

    def stepped(self):
        """A step has ended the micro-batch."""
        self.has_ended = False

    def discard(self):
        """The window is given up."""
        self._leave(State.BETWEEN)
        self.has_ended = False

    def _begin(self, core, end):
        if self._scale is None and core.loss_scale != 1.0:
            raise EngineError(
                f"the loss is not multiplied by the loss scale {core.loss_scale}; call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )
        if self._state is State.DRIVEN:
            return
        self.check()
        self._state = State.RUNNING
        _queue_callback(lambda: end() if self._state is State.RUNNING else None)

    def _leave(self, state):
        self._state, self._scale = state, None
        self._arrived.clear()
        self._open.clear()

    def _opened(self, _):
        task = torch._C._current_graph_task_id()
        if task in self._open:
            return
        if self._open:  # no backward of a model's output runs within another
            self._give_up()
            self.check()
        self._open.add(task)
        _queue_callback(lambda: self._open.discard(task))

    def _give_up(self):
        """A backward has failed that nobody told of."""
        is_partial = self._arrived or (self._open and self.has_ended)
        is_lost = is_partial or self._state is State.FAILED
        self._leave(State.FAILED if is_lost else State.BETWEEN)

    def _unscaled(self):
        self._scale = None
