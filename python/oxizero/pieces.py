"""Parameters that are sharded before there is an engine: each rank keeps an equal, flat piece."""

import contextlib
import itertools
import weakref
import zlib

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oxizero import _oxizero, backends, guard, registry, world
from oxizero._oxizero import ConfigError
from oxizero.splits import local

_TRAINED = (torch.float32, torch.bfloat16, torch.float16)

_pieces = WeakIdKeyDictionary()
_by_storage = weakref.WeakValueDictionary()
_numbers = itertools.count()
# By device, and by the back end that the configuration names.
_groups = {}


class _Group:
    """All ranks, who meet when the first parameter of a device is sharded."""

    def __init__(self, back_end):
        self._give, self._ranks = back_end.give, _oxizero.Ranks(back_end.world)

    def broadcast(self, tensor, root):
        with torch._C.DisableTorchFunction():
            self._ranks.broadcast(self._give(tensor), root)

    def all_gather(self, shard, full):
        with torch._C.DisableTorchFunction():
            self._ranks.all_gather(self._give(shard), self._give(full))


def _group(device, back_end):
    if (device, back_end) not in _groups:
        _groups[device, back_end] = _Group(backends.of(device, back_end))
    return _groups[device, back_end]


class Piece:
    """A parameter whose memory comes and goes, and this rank's piece of it."""

    def __init__(self, param, back_end):
        if param.device.type == "meta":
            raise ConfigError(
                "a parameter on the meta device is refused: zero.Init shards values, and it has "
                "none; build the model on the device that it is to be trained on"
            )
        self.group = _group(param.device, back_end)
        # In the order in which all ranks make them.
        self.number = next(_numbers)
        self._param = weakref.ref(param)
        self._holds = 0
        # The piece in whose memory the parameter was made.
        origin = of(param)
        self.origin = origin and weakref.ref(origin)
        self._lay_out(param, param.detach())

    def _lay_out(self, param, values):
        """Keeps a piece of `values`, which are rank 0's on all ranks; a collective call."""
        size = world.place().size
        share = -(-values.numel() // size)
        self._flat = torch.zeros(share * size, dtype=values.dtype, device=values.device)
        self._flat[: values.numel()] = values.flatten()
        self._piece = torch.empty(share, dtype=values.dtype, device=values.device)
        self._storage = self._flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        self.whole = self._flat[: values.numel()].view(values.shape)
        self._broadcast(0)
        param.data = self.whole
        self._free()
        _by_storage[self._storage._cdata] = self

    def hold(self):
        """Has the parameter whole until as many calls of `let_go`; a collective call."""
        if self._holds == 0:
            guard.allocate(self._storage, self._bytes)
            self.group.all_gather(self._piece, self._flat)
        self._holds += 1

    def let_go(self):
        """Gives up what one `hold` took."""
        self._holds -= 1
        if self._holds == 0:
            self._free()

    def share(self, root):
        """What rank `root` wrote is the parameter from now on; a collective call."""
        param = self._param()
        if param is not None and self.is_left(param):
            self._refuse_others(param, "the parameter")
            if (param.shape, param.dtype) != (self.whole.shape, self.whole.dtype):
                raise ConfigError(
                    f"a parameter of {self._shown()} was assigned data of {_shown(param)} since it "
                    "was sharded; initialize() takes it, GatheredParameters does not"
                )
            self.whole.copy_(param.detach().clone())
            param.data = self.whole
        self._broadcast(root)

    def is_left(self, param):
        """Whether the parameter has other memory than its own here: its `data` was assigned."""
        own = self.whole
        return (
            param.untyped_storage()._cdata != self._storage._cdata
            or param.shape != own.shape
            or param.stride() != own.stride()
            or param.storage_offset() != own.storage_offset()
        )

    def told(self, param):
        """What ranks tell each other of the parameter, as numbers that float32 has: whether it is
        left, and a check sum of what it looks like."""
        other = of(param) or self
        looks = f"{_shown(param)} {other.number}"
        return float(self.is_left(param)), float(zlib.crc32(looks.encode()) % 2**24)

    def take_over(self, param, name):
        """What was assigned to the parameter's `data` is the parameter; a collective call."""
        self._refuse_others(param, f"`{name}`")
        self.hold()
        values = param.detach().clone() if self.is_left(param) else self.whole.clone()
        self.let_go()
        del _by_storage[self._storage._cdata]
        self._lay_out(param, values)

    def _refuse_others(self, param, name):
        if of(param) not in (None, self):
            raise ConfigError(
                f"{name} was assigned the data of another parameter that zero.Init has sharded; "
                "assign a clone() of it, inside of zero.Init, or make both one Parameter"
            )

    def _broadcast(self, root):
        self.group.broadcast(self._flat, root)
        start = world.place().rank * len(self._piece)
        self._piece.copy_(self._flat[start : start + len(self._piece)])

    def _shown(self):
        return _shown(self.whole)

    def _free(self):
        try:
            guard.free(
                self._storage,
                "a parameter that was made inside of oxizero.zero.Init is sharded; use "
                "oxizero.zero.GatheredParameters, or initialize() an engine",
            )
        except RuntimeError as error:
            raise ConfigError(
                f"the memory of a parameter of {self._shown()}, which zero.Init has sharded, "
                f"cannot be freed ({error}): an array has it too, as of numpy(); use "
                "`param.detach().clone().numpy()`, and write with `param.data.copy_(tensor)`"
            ) from error


def shard(param, back_end=None):
    """Keeps this rank's piece of a parameter; rank 0's values count. A collective call, by the back
    end that the configuration names, if it does."""
    if param in _pieces or not _has_pieces(param):
        return
    # Such as one of a parametrization, which is made of the parameter that it replaces.
    origin = of(param)
    if origin is not None:
        origin.hold()
    try:
        _pieces[param] = Piece(param, back_end)
    finally:
        if origin is not None:
            origin.let_go()


def find(param):
    """The piece of a parameter that is in pieces, and no engine's; else None."""
    return _pieces.get(param)


def of(tensor):
    """The piece of the parameter in whose memory a tensor lies; else None."""
    is_known = any(tensor.device == device for device, _ in _groups)
    if tensor.layout != torch.strided or not is_known:
        return None
    return _by_storage.get(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def replaceable(param):
    """Has a parameter whole, if it is in pieces; other memory that it is given is its values. A
    collective call."""
    piece = None if param is None else find(param)
    if piece is None:
        yield
        return
    piece.hold()
    try:
        yield
    finally:
        piece.let_go()
    if piece.is_left(param):
        with torch._C.DisableTorchFunction(), torch.no_grad():
            piece.take_over(param, f"a parameter of {piece._shown()}")


def settle(module):
    """Parameters in pieces whose `data` was assigned since they were sharded have these values,
    rank 0's, from now on; a collective call."""
    _check_memory(module)
    params = [(name, param) for name, param in module.named_parameters() if find(param)]
    if not params:
        return
    names = {find(param): name for name, param in params}
    for piece, name in names.items():
        origin = piece.origin and piece.origin()
        if origin in names:
            raise ConfigError(
                f"`{names[origin]}` and `{name}` were made to share memory inside of "
                "zero.Init, which has separated them; assign one Parameter to both names, or clone "
                "one of them"
            )
    with torch._C.DisableTorchFunction(), torch.no_grad():
        first = params[0][1]
        told = [find(param).told(param) for _, param in params]
        own = torch.tensor(told, dtype=torch.float32, device=first.device)
        told = own.new_empty(world.place().size, *own.shape)
        find(first).group.all_gather(own.flatten(), told.flatten())
        for (name, param), of_ranks in zip(params, told.cpu().unbind(1), strict=True):
            are_left, looks = of_ranks.unbind(1)
            if looks.ne(looks[0]).any():
                raise ConfigError(
                    f"the data that `{name}` was assigned since zero.Init sharded it is not of one "
                    f"shape and dtype on all ranks; on this one it has {_shown(param)}"
                )
            if not _has_pieces(param):
                del _pieces[param]  # it is as any parameter that was made elsewhere
            elif are_left.any():
                find(param).take_over(param, name)


def _check_memory(module):
    """Refuses tensors that lie in the memory of a parameter in pieces, and are none: it is gone."""
    params = [(f"parameter `{name}`", param) for name, param in module.named_parameters()]
    buffers = [(f"buffer `{name}`", buffer) for name, buffer in module.named_buffers()]
    for name, tensor in params + buffers:
        is_known = find(tensor) is not None or registry.find(tensor) is not None
        if not is_known and _is_gone(local(tensor)):
            raise ConfigError(
                f"{name} was made of the data of a parameter that zero.Init has sharded, and that "
                "data is gone; make parameters of other parameters' data inside of zero.Init, and "
                "all else of a clone() of it, there or inside of oxizero.zero.GatheredParameters"
            )


def _is_gone(tensor):
    has_memory = tensor.layout != torch.strided or tensor.untyped_storage().nbytes() > 0
    return tensor.numel() > 0 and not has_memory


def _has_pieces(param):
    return param.numel() > 0 and param.dtype in _TRAINED


def _shown(tensor):
    return f"shape {tuple(tensor.shape)} and {tensor.dtype}"


@contextlib.contextmanager
def taken(param):
    """The values of a parameter that is in pieces, and no longer is: its memory is another's by
    now. A collective call."""
    piece = _pieces.pop(param)
    piece.hold()
    try:
        yield piece.whole
    finally:
        piece.let_go()
