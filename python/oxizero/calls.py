"""What a module's hooks do in stage 3: weights are whole while a call of it runs, in forward and in
backward.

Two identities in the autograd graph, around what the module computes, tell when backward comes to
it and when it has left. They return detached aliases and not views, which nobody could change in
place.
"""

import functools

import torch

from oxizero._oxizero import EngineError
from oxizero.nested import leaves, mapped

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


# What holds no tensors.
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


class _Entry(torch.autograd.Function):
    """A module's inputs: in backward it has ended. `told` is a leaf of no elements, or None."""

    @staticmethod
    def forward(ctx, call, told, *tensors):
        ctx.call, ctx.told = call, told
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        ctx.call.let_go()
        return None, None if ctx.told is None else ctx.told.detach(), *grads


class _Exit(torch.autograd.Function):
    """A module's outputs: in backward it begins."""

    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        ctx.call.begin()
        return None, *grads


class _Call:
    """One call of a unit's module, and the backward passes through it."""

    def __init__(self, uses):
        self._uses = uses
        # Until the module returns: a graph that holds the call would keep them alive with it.
        self._inputs = []
        # Whether backward goes on from it to an input.
        self._tells_its_end = False
        self._is_held = False
        self.is_counted = False
        # Inputs in lists and other objects whose gradients say that backward has left: how many,
        # None where that cannot be known, and those to which the running backward has come.
        self._hidden = 0
        self._reached = set()

    def enter(self, args, kwargs):
        """The arguments, those in a graph behind the identity. What lies in lists and other objects
        stays as it is, for the module may change these."""
        wanted = [value for value in (*args, *kwargs.values()) if _in_graph(value)]
        if not wanted:
            if self._uses.has_frozen:
                self._follow((args, kwargs))
            return args, kwargs
        told = self._uses.told(self, wanted[0].device)
        new = dict(zip(map(id, wanted), _Entry.apply(self, told, *wanted), strict=True))
        self._inputs = [(tensor, tensor._version) for tensor in new.values()]
        return (
            tuple(new.get(id(value), value) for value in args),
            {name: new.get(id(value), value) for name, value in kwargs.items()},
        )

    def leave(self, output):
        """What the module returns, with the tensors that are in a graph behind the identity."""
        inputs, self._inputs = self._inputs, []
        if any(tensor._version != version for tensor, version in inputs):
            raise EngineError(
                f"module `{self._uses.name}` changes its input in place, which its caller's "
                "graph cannot see in stage 3; make a new tensor, as in x = x + y"
            )
        output = mapped(output, self._uses.copied)
        wanted = []
        mapped(output, lambda tensor: wanted.append(tensor) if _in_graph(tensor) else None)
        if not wanted:
            return output
        self._tells_its_end = bool(inputs)
        if inputs:
            self._uses.opened(self)
        new = dict(zip(map(id, wanted), _Exit.apply(self, *wanted), strict=True))
        return mapped(output, lambda tensor: new.get(id(tensor)))

    def begin(self):
        """Backward comes to the module."""
        if self._is_held:
            return
        if torch.is_grad_enabled():
            raise EngineError(
                f"backward with create_graph=True comes to module `{self._uses.name}`, whose "
                "weights are whole only until backward has left it; in stage 3 gradients of "
                "gradients are not available: use stage 2"
            )
        self._uses.hold()
        self._is_held = True
        self._reached.clear()
        # Where no input is in a graph, or a backward does not go on to it.
        _queue_callback(self.let_go)
        self._uses.begun(self, self._tells_its_end)

    def is_through(self):
        """Whether backward has come to all inputs in lists and other objects."""
        return len(self._reached) == self._hidden

    def let_go(self):
        """Gives the weights up, if nobody has."""
        if self._is_held:
            self._is_held = False
            self._uses.left(self)

    def _follow(self, given):
        """Takes note of when backward has come to the inputs in lists and other objects."""
        for value in leaves(given):
            is_tensor = isinstance(value, torch.Tensor)
            if isinstance(value, _PLAIN) or is_tensor and not value.requires_grad:
                continue
            if not is_tensor or value.is_leaf:
                # Another object may hold tensors, and a leaf would keep the hook.
                self._hidden = None
                return
            value.register_hook(functools.partial(self._reach, self._hidden))
            self._hidden += 1

    def _reach(self, number, _):
        self._reached.add(number)
        self._uses.reached()


class Uses:
    """The calls of one unit that are under way."""

    def __init__(self, unit, buckets, own, trained, ahead):
        self.name = unit.name or type(unit.module).__name__
        self.number = ahead.count()
        self.buckets = buckets
        self._ahead = ahead
        # The indexes of the unit's trained parameters.
        self.trained = trained
        # Whether the gradients of all of them have come in this pass.
        self._has_all = not trained
        # Of a leaf, the buckets that are its own: ranks may use different parts of them.
        self._own = own
        for bucket in own:
            bucket.await_grads_end()
        self._is_leaf = unit.is_leaf
        self._forward = []
        self._backward = []
        self._waiting = []
        # Calls of a leaf whose backward is to come.
        self._open = 0

    def before(self, args, kwargs):
        """The module is called."""
        self.hold()
        call = _Call(self)
        self._forward.append(call)
        self._ahead.forward(self)
        return call.enter(args, kwargs) if torch.is_grad_enabled() else None

    def after(self, output):
        """The module returns, or fails."""
        if not self._forward:
            return None
        call = self._forward.pop()
        try:
            return call.leave(output)
        finally:
            try:
                let_go(self.buckets)
            finally:
                self._ahead.left()

    @property
    def has_frozen(self):
        """Whether backward needs weights that have no gradients to come."""
        return not all(bucket.trained for bucket in self.buckets)

    def hold(self):
        """Has the weights whole."""
        try:
            hold(self.buckets)
        except EngineError as error:
            error.add_note(f"The weights of module `{self.name}` were gathered.")
            raise

    def copied(self, tensor):
        """A copy of an output that lies in memory which is about to be freed."""
        return tensor.clone() if any(bucket.holds(tensor) for bucket in self.buckets) else None

    def told(self, call, device):
        """Of a leaf, a tensor to which backward comes with the call's end if it accumulates
        gradients, and does not within `torch.autograd.grad`: the same on all ranks, whichever
        parameters each of them uses."""
        if not self._own:
            return None
        told = torch.empty(0, device=device, requires_grad=True)
        told.register_post_accumulate_grad_hook(lambda _: self.ended(call))
        return told

    def opened(self, call):
        """A call's backward will tell when it has left. One that repeats another within backward,
        as checkpoints do, has no backward of its own while the other's is to come."""
        repeats = torch._C._current_graph_task_id() != -1 and self._open > 0
        if self._own and not repeats:
            call.is_counted = True
            self._open += 1

    def begun(self, call, tells_its_end):
        """The backward of a call has begun."""
        self._backward.append(call)
        # Which of a leaf's gradients come is each rank's own affair.
        if not tells_its_end and not self._is_leaf:
            self._waiting.append(call)
        self._ahead.backward(self)

    def arrived(self, arrived):
        """These parameters have gradients in this pass."""
        self._has_all = self.trained <= arrived
        self.reached()

    def reached(self):
        """A gradient of a parameter or an input has come: calls that waited for the last one have
        ended."""
        if self._waiting and self._has_all:
            through = [call for call in self._waiting if call.is_through()]
            self._waiting = [call for call in self._waiting if call not in through]
            for call in through:
                call.let_go()

    def left(self, call):
        """The backward of a call has ended, or is not to go on."""
        self._backward.remove(call)
        let_go(self.buckets)

    def ended(self, call):
        """The backward of a call has run to its end, and gave gradients: once for each call, and
        again where a graph is run again, whose calls are not counted."""
        if not call.is_counted:
            return
        call.is_counted = False
        self._open -= 1
        if self._open == 0:
            for bucket in self._own:
                bucket.grads_end()

    def pass_ended(self):
        """No more gradients come in this pass."""
        self._waiting.clear()
        self._has_all = not self.trained

    def reset(self):
        """No backward is under way."""
        self.pass_ended()
        self._open = 0
        for call in list(self._backward):
            call.let_go()


def hold(buckets):
    """Has all of these whole, or none."""
    held = []
    try:
        for bucket in buckets:
            bucket.hold()
            held.append(bucket)
    except BaseException:
        let_go(held)
        raise


def let_go(buckets):
    """Gives all of these up, and then says what was wrong with the first."""
    errors = []
    for bucket in buckets:
        try:
            bucket.let_go()
        except EngineError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _in_graph(value):
    return isinstance(value, torch.Tensor) and value.requires_grad
