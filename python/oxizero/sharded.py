"""Stage 3: each rank keeps a shard of the weights, which are whole only while a module runs.

Every bucket has one storage of torch's, in which its parameters lie. A module's hooks have the
engine gather into it before forward and free it after; two identities in the autograd graph, around
what the module computes, do the same in backward. So all ranks gather the same in the same order if
they run the same modules, which the engine checks.
"""

import weakref

import torch

from oxizero import guard
from oxizero._oxizero import EngineError
from oxizero.nested import mapped
from oxizero.splits import local
from oxizero.weights import capsule

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class Bucket:
    """Parameters that are gathered together, and the memory in which they are whole."""

    def __init__(self, core, index, told, params, names):
        self._core, self.index, self.trained = core, index, told["trained"]
        self.flat = torch.empty(told["numel"], dtype=getattr(torch, told["dtype"]))
        self._storage = self.flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._holds = 0
        self.params = [local(params[param]) for param, _ in told["params"]]
        self.names = [names[param][0] for param, _ in told["params"]]
        self._versions = []
        for param, (_, start) in zip(self.params, told["params"], strict=True):
            param.data = self.flat[start : start + param.numel()].view(param.shape)
        self._free()

    def hold(self):
        """Has the parameters whole until as many calls of `let_go`; a collective call."""
        if self._holds == 0 and self._bytes > 0:
            guard.allocate(self._storage, self._bytes)
            try:
                self._core.gather(self.index, capsule(self.flat))
            except EngineError as error:
                self._free()
                raise type(error)(
                    f"while gathering `{self.names[0]}`: {error}; a module that some ranks skip is "
                    "declared with oxizero.utils.set_z3_leaf_modules"
                ) from error
            self._versions = [param._version for param in self.params]
        self._holds += 1

    def let_go(self):
        """Gives up what one `hold` took."""
        self._holds -= 1
        if self._holds > 0 or self._bytes == 0:
            return
        written = self.written()
        self._core.let_go(self.index)
        self._free()
        if written:
            raise EngineError(
                f"parameter `{written[0]}` was written while its weights were gathered, which is "
                "lost; write to it inside oxizero.zero.GatheredParameters(params, modifier_rank=0)"
            )

    def written(self):
        """The names of parameters that were written since they were gathered."""
        pairs = zip(self.params, self._versions, self.names, strict=True)
        return [name for param, version, name in pairs if param._version != version]

    def take_over(self):
        """What was written is the weights from now on."""
        self._core.take_over_gathered(self.index, capsule(self.flat))
        self._versions = [param._version for param in self.params]

    def holds(self, tensor):
        """Whether a tensor lies in the bucket's memory."""
        return tensor.untyped_storage()._cdata == self._storage._cdata

    def is_held(self):
        """Whether the parameters are whole."""
        return self._holds > 0

    def check(self):
        """Refuses parameters that somebody has given other memory."""
        for param, name in zip(self.params, self.names, strict=True):
            if not self.holds(param):
                raise EngineError(
                    f"parameter `{name}` has other memory than initialize() gave it: model.to(), "
                    "model.half() and `param.data = ...` replace it; convert the model before "
                    "initialize()"
                )

    def _free(self):
        if self._bytes > 0:
            name = self.names[0] if len(self.names) == 1 else f"{self.names[0]}` and others `"
            guard.free(
                self._storage,
                f"the weights of `{name}` are sharded, and whole only while their module runs; use "
                "oxizero.zero.GatheredParameters, or oxizero.utils.safe_get_full_fp32_param",
            )


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


class _Entry(torch.autograd.Function):
    """Identity of a module's inputs: in backward the module has ended."""

    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads):
        ctx.call.end()
        return None, *grads


class _Exit(torch.autograd.Function):
    """Identity of a module's outputs: in backward the module begins."""

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
    """One use of a unit, in forward and in the backward passes through it."""

    def __init__(self, unit):
        self.unit = unit
        self.inputs = []
        self._is_held = False

    def enter(self, args, kwargs):
        """The inputs, so that backward tells when it has left the module."""
        inputs = [*args, *kwargs.values()]
        wanted = [tensor for tensor in inputs if _in_graph(tensor)]
        if not wanted:
            return args, kwargs
        new = dict(zip(map(id, wanted), _Entry.apply(self, *wanted), strict=True))
        self.inputs = [(tensor, tensor._version) for tensor in new.values()]
        return (
            tuple(new.get(id(value), value) for value in args),
            {name: new.get(id(value), value) for name, value in kwargs.items()},
        )

    def leave(self, output):
        """The outputs, so that backward tells when it enters the module."""
        for tensor, version in self.inputs:
            if tensor._version != version:
                raise EngineError(
                    f"module `{self.unit.name}` changes its input in place, which its caller's "
                    "graph cannot see in stage 3; make a new tensor, as in x = x + y"
                )
        output = mapped(output, self.unit.outlives)
        wanted = []
        mapped(output, lambda tensor: wanted.append(tensor) if _in_graph(tensor) else None)
        if not wanted:
            return output
        new = dict(zip(map(id, wanted), _Exit.apply(self, *wanted), strict=True))
        return mapped(output, lambda tensor: new.get(id(tensor)))

    def begin(self):
        """Backward comes to the module."""
        if not self._is_held:
            self.unit.hold()
            self._is_held = True
            # Where no input has a gradient, or not all of backward is run.
            _queue_callback(self.end_late)
            if not self.inputs:
                self.unit.waiting.append(self)

    def end(self):
        """Backward has left the module."""
        self.end_late()
        self.unit.ended(self)

    def end_late(self):
        """Lets go of the weights if nobody has."""
        if self._is_held:
            self._is_held = False
            self.unit.let_go()


class _Sharded:
    """A unit's buckets, and its calls."""

    def __init__(self, unit, buckets, core):
        self.name = unit.name or type(unit.module).__name__
        self.buckets = buckets
        self.waiting = []
        self._calls = []
        self._core = core

    def hold(self):
        hold(self.buckets)

    def let_go(self):
        let_go(self.buckets)

    def outlives(self, tensor):
        """A copy of an output that lies in memory that is about to be freed."""
        lies_here = any(bucket.holds(tensor) for bucket in self.buckets)
        return tensor.clone() if lies_here else None

    def before(self, args, kwargs):
        self.hold()
        call = _Call(self)
        self._calls.append(call)
        return call.enter(args, kwargs) if torch.is_grad_enabled() else None

    def after(self, output):
        if not self._calls:
            return None
        call = self._calls.pop()
        try:
            return call.leave(output)
        finally:
            self.let_go()

    def ended(self, call):
        pass


def _in_graph(value):
    return isinstance(value, torch.Tensor) and value.requires_grad


class Sharded:
    """The parameters of a model whose weights rest sharded."""

    def __init__(self, core, weights, units):
        self._core = core
        index_of = {id(param): index for index, param in enumerate(weights.params)}
        self.buckets = [
            Bucket(core, index, told, weights.params, weights.names)
            for index, told in enumerate(core.buckets)
        ]
        self._bucket_of = {
            id(weights.params[param]): self.buckets[index]
            for index, told in enumerate(core.buckets)
            for param, _ in told["params"]
        }
        self._trained = [local(param) for _, param in weights.trained()]
        self._arrived = set()
        self._hooks, self._units = [], []
        for unit in units:
            params = [param for param in unit.params if id(param) in index_of]
            buckets = {self._bucket_of[id(param)].index: None for param in params}
            sharded = _Sharded(unit, [self.buckets[index] for index in sorted(buckets)], core)
            sharded.trained = {
                index_of[id(param)] for param in params if self._bucket_of[id(param)].trained
            }
            self._units.append(sharded)
            self._hooks += _hooked(unit.module, weakref.ref(sharded))

    def bucket_of(self, param):
        """The bucket of a parameter that the engine holds."""
        return self._bucket_of[id(param)]

    def arrived(self, index):
        """A parameter's gradient has come: backward is done with modules that wanted no other."""
        self._arrived.add(index)
        for unit in self._units:
            if unit.waiting and unit.trained <= self._arrived:
                while unit.waiting:
                    unit.waiting.pop().end()

    def pass_ended(self):
        """No more gradients come."""
        self._arrived.clear()
        for unit in self._units:
            unit.waiting.clear()

    def take_over(self, core):
        """Refuses a step while weights are held, or lie elsewhere."""
        for bucket in self.buckets:
            if bucket.is_held():
                raise EngineError(
                    f"the weights of `{bucket.names[0]}` are gathered; step outside of forward, "
                    "backward and GatheredParameters"
                )
            bucket.check()

    def stepped(self):
        """The engine wrote the weights: graphs that still need the old ones are to notice."""
        for param in self._trained:
            torch.autograd.graph.increment_version(param)


def _hooked(module, unit):
    """A model does not keep its engine."""

    def before(module, args, kwargs):
        alive = unit()
        return None if alive is None else alive.before(args, kwargs)

    def after(module, args, output):
        alive = unit()
        return None if alive is None else alive.after(output)

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]
