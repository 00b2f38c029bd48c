"""Stage 3: each rank keeps a shard of the weights, which are whole only while a module runs.

Every bucket has one storage of torch's, in which its parameters lie. The engine gathers into it,
and it is freed again; parameters stay the same tensors. All ranks gather the same in the same order
if they run the same modules, which the engine checks.
"""

import contextlib
import math
import re
import weakref
from collections import Counter

import torch

from oxizero import guard
from oxizero._oxizero import EngineError
from oxizero.ahead import Ahead
from oxizero.calls import Uses
from oxizero.saving import Saving
from oxizero.splits import local
from oxizero.units import Unit
from oxizero.weights import replaced


# What torch says when an operation makes a view of memory that is gone: sizes, the offset in
# elements, and where it ends in bytes.
_NO_VIEW = re.compile(
    r"setStorage: sizes \[(.*?)\].*storage offset (\d+).*requiring a storage size of (\d+) .*"
    r"out of bounds for storage of size 0"
)


class Bucket:
    """Parameters that are gathered together, and the memory in which they are whole."""

    def __init__(self, core, index, told, params, names):
        self._core, self.index, self.trained = core, index, told["trained"]
        dtype, device = getattr(torch, told["dtype"]), core.back_end.device
        self.flat = torch.empty(told["numel"], dtype=dtype, device=device)
        self._storage = self.flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        self.numel = told["numel"]
        self._holds = 0
        # Whether a gather of them was started, which nobody has waited for.
        self._is_arriving = False
        self.indexes = {param for param, _ in told["params"]}
        self.params = [local(params[param]) for param, _ in told["params"]]
        self.names = [names[param][0] for param, _ in told["params"]]
        self._versions = []
        # Times that what was gathered is compared before it goes: what is written through `data`
        # no version tells, and a module that does so does it in its first calls.
        self._looks = 2
        for param, (_, start) in zip(self.params, told["params"], strict=True):
            param.data = self.flat[start : start + param.numel()].view(param.shape)
        self._free()

    def hold(self):
        """Has the parameters whole until as many calls of `let_go`; a collective call."""
        if self._holds == 0 and self._bytes > 0:
            try:
                if self._is_arriving:
                    self._is_arriving = False
                    self._core.finish_gather(self.index)
                    guard.allow(self._storage)
                else:
                    guard.allocate(self._storage, self._bytes)
                    self._core.gather(self.index, self._core.back_end.give(self.flat))
            except BaseException:
                self._free()
                raise
            self._versions = [param._version for param in self.params]
        self._holds += 1

    def start(self):
        """Has them gathered while others compute, for the next `hold`, unless they are already;
        until then nobody reads them. A collective call."""
        if self._is_arriving or self._bytes == 0:
            return
        guard.allocate(self._storage, self._bytes)
        # A storage of its own for the same memory, which torch's operations may fill while reads
        # of this one are refused.
        arriving = torch.from_dlpack(self.flat)
        try:
            self._core.start_gather(self.index, self._core.back_end.give(arriving))
        except BaseException:
            self._free()
            raise
        self._is_arriving = True
        guard.forbid(self._storage, self._gone())

    def drop(self):
        """What was started, if it was, is not wanted."""
        if self._is_arriving:
            self._is_arriving = False
            try:
                self._core.let_go(self.index)
            finally:
                self._free()

    def let_go(self):
        """Gives up what one `hold` took."""
        self._holds -= 1
        if self._holds > 0 or self._bytes == 0:
            return
        written = self.written() or self._changed()
        self._core.let_go(self.index)
        self._free()
        if written:
            raise EngineError(
                f"parameter `{written[0]}` was written while its weights were gathered, which is "
                "lost; write to it inside oxizero.zero.GatheredParameters(params, modifier_rank=0)"
            )

    def look(self):
        """What is gathered is compared when it goes."""
        self._looks = max(self._looks, 1)

    def _changed(self):
        if self._looks == 0:
            return []
        self._looks -= 1
        full = self._core.back_end.give(self.flat)
        if self._core.is_as_gathered(self.index, full):
            return []
        return [" or ".join(self.names)]

    def await_grads_end(self):
        """Its gradients are complete when `grads_end` says so."""
        self._core.await_grads_end(self.index)

    def grads_end(self):
        """No more gradients of it come in this pass; it is reduced in its turn."""
        self._core.grads_end(self.index)

    def written(self):
        """The names of parameters that were written since they were gathered."""
        pairs = zip(self.params, self._versions, self.names, strict=True)
        return [name for param, version, name in pairs if param._version != version]

    def take_over(self):
        """What was written is the weights from now on."""
        self._core.take_over_gathered(self.index, self._core.back_end.give(self.flat))
        for param in self.params:  # graphs that still need the old ones are to notice
            torch.autograd.graph.increment_version(param)
        self._versions = [param._version for param in self.params]

    def broadcast(self, rank):
        """What `rank` wrote, or who stands for it, is what was written; a collective call."""
        full = self._core.back_end.give(self.flat)
        self._core.broadcast_values(min(self.indexes), full, rank)

    def write(self, param, values):
        """Gives a parameter other values, on every rank; a collective call."""
        self.hold()
        param.data.copy_(values)
        self.take_over()
        self.let_go()

    def discard(self):
        """What was written is lost, and is to be."""
        self._looks = 0
        self._versions = [param._version for param in self.params]

    def holds(self, tensor):
        """Whether a tensor lies in the bucket's memory."""
        tensor = local(tensor)
        is_plain = tensor.layout == torch.strided and tensor.device == self.flat.device
        return is_plain and tensor.untyped_storage()._cdata == self._storage._cdata

    def is_held(self):
        """Whether the parameters are whole."""
        return self._holds > 0

    def check(self):
        """Refuses parameters that somebody has given other memory."""
        for param, name in zip(self.params, self.names, strict=True):
            if not self.holds(param):
                raise replaced(name)

    def dissolve(self):
        """Leaves every parameter whole, in memory of its own; a collective call."""
        self.hold()
        whole = [param.detach().clone() for param in self.params]
        self.let_go()
        for param, data in zip(self.params, whole, strict=True):
            param.data = data

    def _free(self):
        if self._bytes > 0:
            guard.free(self._storage, self._gone())

    def _gone(self):
        names = f"`{self.names[0]}`" + (" and others" if len(self.names) > 1 else "")
        return (
            f"the weights of {names} are sharded, and whole only while their module runs; use "
            "oxizero.zero.GatheredParameters or register_external_parameter"
        )


class Sharded:
    """The parameters of a model whose weights rest sharded."""

    def __init__(self, core, weights, prefetch):
        self.buckets = [
            Bucket(core, index, told, weights.params, weights.names)
            for index, told in enumerate(core.buckets)
        ]
        self._index_of = {id(param): index for index, param in enumerate(weights.params)}
        self._bucket_of = {
            index: bucket
            for bucket, told in zip(self.buckets, core.buckets, strict=True)
            for index, _ in told["params"]
        }
        self._trained = [local(param) for _, param in weights.trained()]
        self._arrived = set()
        self._hooks, self._uses = [], {}
        self._ahead = Ahead(self.buckets, *prefetch)
        self._saving = Saving()
        # By parameter: who may wait for its gradient.
        self._waiting = {}
        # The indexes of those that several units use.
        self._tied = set()

    def watch(self, units, root):
        """Has weights whole where modules of the model `root` use, save or load them."""
        users = Counter(id(param) for unit in units for param in unit.params)
        self._tied = {index for param, index in self._index_of.items() if users[param] > 1}
        for unit in units:
            self._watch(unit)
        for module in root.modules():
            buckets = self._buckets_of(module.parameters(recurse=False))
            if buckets:
                self._hooks += self._saving.watch(module, buckets)

    def bucket_of(self, param):
        """The bucket of a parameter that the engine holds."""
        return self._bucket_of[self._index_of[id(param)]]

    def state_dict(self, module, keep):
        """The module's, in which `keep` says what there is of each parameter."""
        default, self._saving.keep = self._saving.keep, keep
        try:
            return module.state_dict()
        finally:
            self._saving.keep = default

    def explain(self, error):
        """Says whose memory is gone, where torch says only that some is."""
        found = _NO_VIEW.search(str(error))
        if found is None:
            return
        numel = math.prod(int(size) for size in found[1].split(",") if size.strip())
        start, end = int(found[2]), int(found[3])

        def has(param):
            first, last = param.storage_offset(), param.storage_offset() + param.numel()
            return first <= start and end <= last * param.element_size()

        gone = [
            (f"`{name}`", param)
            for bucket in self.buckets
            for name, param in zip(bucket.names, bucket.params, strict=True)
            if not bucket.is_held() and has(param)
        ]
        # What was viewed was most often the whole of one.
        names = [name for name, param in gone if param.numel() == numel]
        names = names or [name for name, _ in gone]
        if names:
            error.add_note(
                f"The weights of {' or '.join(names[:5])} are sharded, and whole only while their "
                "module runs; use oxizero.zero.register_external_parameter for a module that uses "
                "another's, or oxizero.zero.GatheredParameters"
            )

    def use(self, module, param):
        """The module's forward uses that parameter too, from its next call on."""
        uses = self._uses.get(id(module))
        if uses is None:
            self._watch(Unit("", module, False, [param]))
        else:
            uses.buckets = self._sorted([*uses.buckets, self.bucket_of(param)])
            if self.bucket_of(param).trained:
                uses.trained.add(self._index_of[id(param)])
                self._waiting.setdefault(self._index_of[id(param)], []).append(uses)

    @contextlib.contextmanager
    def called(self):
        """The model is called: an error says whose memory is gone."""
        self._ahead.entered()
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self._ahead.left()

    def arrived(self, index):
        """A parameter's gradient has come."""
        self._arrived.add(index)
        for uses in self._waiting.get(index, ()):
            uses.arrived(self._arrived)

    def pass_ended(self):
        """No more gradients come in this pass."""
        self._arrived.clear()
        for uses in self._uses.values():
            uses.pass_ended()

    def reset(self):
        """No backward is under way, whether it has ended well or not."""
        self._arrived.clear()
        for uses in self._uses.values():
            uses.reset()
        self._ahead.reset()

    def take_over(self, core):
        """Refuses a step while weights are held, or lie elsewhere."""
        self.reset()
        self._saving.reset()
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

    def dissolve(self):
        """Leaves a model like any other, with whole weights; a collective call."""
        for hook in self._hooks:
            hook.remove()
        self.reset()
        self._saving.reset()
        for bucket in self.buckets:
            bucket.dissolve()

    def _watch(self, unit):
        params = [param for param in unit.params if id(param) in self._index_of]
        buckets = self._buckets_of(params)
        if not buckets:
            return
        indexes = {self._index_of[id(param)] for param in params}
        trained = {index for index in indexes if self._bucket_of[index].trained}
        owned = self._buckets_of(unit.owned) if unit.is_leaf else []
        # Gradients of what another unit uses too may come after the leaf's backward.
        own = [bucket for bucket in owned if bucket.trained and not bucket.indexes & self._tied]
        uses = Uses(unit, buckets, own, trained, self._ahead)
        self._uses[id(unit.module)] = uses
        for index in trained:
            self._waiting.setdefault(index, []).append(uses)
        self._hooks += _watched(unit.module, weakref.ref(uses))

    def _buckets_of(self, params):
        known = [param for param in params if id(param) in self._index_of]
        return self._sorted(map(self.bucket_of, known))

    def _sorted(self, buckets):
        """In one order on every rank, each once."""
        return [self.buckets[index] for index in sorted({bucket.index for bucket in buckets})]


def _watched(module, uses):
    """A module that is called has its weights. A model does not keep its engine; a copy of it has
    its hooks, and weights of its own."""
    own = weakref.ref(module)

    def before(module, args, kwargs):
        alive = uses()
        return alive.before(args, kwargs) if alive is not None and module is own() else None

    def after(module, args, output):
        alive = uses()
        return alive.after(output) if alive is not None and module is own() else None

    # A compiled graph ends before them, and another begins after.
    before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, always_call=True),
    ]
