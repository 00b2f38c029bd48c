"""Parameters that are sharded before there is an engine: each rank keeps an equal, flat piece."""

import contextlib
import itertools
import weakref

import torch
from torch.utils.dlpack import to_dlpack as capsule
from torch.utils.weak import WeakIdKeyDictionary

from oxizero import _oxizero, guard, world
from oxizero._oxizero import ConfigError

_TRAINED = (torch.float32, torch.bfloat16, torch.float16)

_pieces = WeakIdKeyDictionary()
_by_storage = weakref.WeakValueDictionary()
_numbers = itertools.count()
_group = None


def _ranks():
    """All ranks, who meet when the first parameter is sharded."""
    global _group
    if _group is None:
        _group = _oxizero.Group(world.meeting())
    return _group


class Piece:
    """A parameter whose memory comes and goes, and this rank's piece of it."""

    def __init__(self, param):
        if param.device.type != "cpu":
            raise ConfigError(
                f"a parameter on {param.device} is refused: zero.Init shards what is on the CPU"
            )
        # In the order in which all ranks make them.
        self.number = next(_numbers)
        size = world.place().size
        share = -(-param.numel() // size)
        self._flat = torch.zeros(share * size, dtype=param.dtype)
        self._flat[: param.numel()] = param.detach().flatten()
        self._piece = torch.empty(share, dtype=param.dtype)
        self._storage = self._flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._holds = 0
        self.whole = self._flat[: param.numel()].view(param.shape)
        self.share(0)
        param.data = self.whole
        self._free()
        _by_storage[self._storage._cdata] = self

    def hold(self):
        """Has the parameter whole until as many calls of `let_go`; a collective call."""
        if self._holds == 0:
            guard.allocate(self._storage, self._bytes)
            _ranks().all_gather(capsule(self._piece), capsule(self._flat))
        self._holds += 1

    def let_go(self):
        """Gives up what one `hold` took."""
        self._holds -= 1
        if self._holds == 0:
            self._free()

    def share(self, root):
        """What rank `root` wrote is the parameter from now on; a collective call."""
        _ranks().broadcast(capsule(self._flat), root)
        start = world.place().rank * len(self._piece)
        self._piece.copy_(self._flat[start : start + len(self._piece)])

    def _free(self):
        guard.free(
            self._storage,
            "a parameter that was made inside of oxizero.zero.Init is sharded; use "
            "oxizero.zero.GatheredParameters, or initialize() an engine",
        )


def shard(param):
    """Keeps this rank's piece of a parameter; rank 0's values count. A collective call."""
    if param not in _pieces and param.numel() > 0 and param.dtype in _TRAINED:
        _pieces[param] = Piece(param)


def find(param):
    """The piece of a parameter that is in pieces, and no engine's; else None."""
    return _pieces.get(param)


def of(tensor):
    """The piece of the parameter in whose memory a tensor lies; else None."""
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return None
    return _by_storage.get(tensor.untyped_storage()._cdata)


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
