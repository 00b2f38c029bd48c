"""Weights that rest sharded, from the start and made whole for a while, with DeepSpeed's names."""

import contextlib
from collections.abc import Iterable

import torch

from oxizero import pieces, registry, units, world
from oxizero._oxizero import ConfigError, EngineError
from oxizero.calls import hold, let_go
from oxizero.init import Init
from oxizero.splits import local


__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "unregister_external_parameter",
]


class GatheredParameters:
    """Has parameters whole inside of a `with`, on every rank; a collective call at both ends.

    With `modifier_rank`, a global rank, that rank's values become the weights and master weights
    of all ranks at the end; without it, parameters may only be read. Of a parameter of which ranks
    hold different parts, or experts of their own, each part's values are those of the rank that
    stands among the part's ranks where `modifier_rank` stands among its own.

    `params` is a parameter, a module, or several parameters; those of no engine are left as they
    are. In stages 0, 1 and 2 weights are whole anyway, and only what `modifier_rank` says is done.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        if fwd_module is not None:
            raise ConfigError(
                "GatheredParameters(fwd_module=...) is refused: call "
                "oxizero.zero.register_external_parameter(module, param)"
            )
        size = world.place().size
        if modifier_rank is not None and not 0 <= modifier_rank < size:
            raise ConfigError(
                f"GatheredParameters(modifier_rank={modifier_rank}) names none of the {size} ranks"
            )
        self._modifier = modifier_rank
        self._params = _listed(params) if enabled else []
        self._engines, self._buckets, self._resting, self._pieces = [], [], [], []

    def __enter__(self):
        """The order is that of engines and pieces: a set's is another one on each rank."""
        engines, buckets, found, resting = {}, {}, {}, {}
        for param in self._params:
            engine = registry.engine_of(param)
            if engine is None:
                piece = pieces.find(param)
                if piece is not None:
                    found[piece.number] = (piece, (param, param._version))
                continue
            number, index = registry.place_of(param)
            engines[number] = engine
            if engine._sharded is None:
                resting[number, index] = (engine, param)
            else:
                bucket = engine._sharded.bucket_of(param)
                buckets[number, bucket.index] = bucket
        self._engines, self._buckets, self._pieces, self._resting = map(
            _in_order, (engines, buckets, found, resting)
        )
        for core in self._sharing():
            core.barrier()  # nobody reads any more
        for bucket in self._buckets:
            bucket.look()
        hold([piece for piece, _ in self._pieces] + self._buckets)

    def __exit__(self, kind, *_):
        is_done = False
        try:
            if kind is None:
                for bucket in self._buckets:
                    bucket.check()
                if self._modifier is not None:
                    self._write()
                is_done = True
            elif issubclass(kind, Exception):
                self._refuse(kind)
        finally:
            if not is_done:
                for bucket in self._buckets:
                    bucket.discard()
            let_go(self._buckets + [piece for piece, _ in self._pieces])
        for _, (param, version) in self._pieces:
            if kind is None and self._modifier is None and param._version != version:
                raise EngineError(
                    "a parameter was written inside of GatheredParameters, which is lost; say "
                    "whose values count, with modifier_rank=0"
                )

    def _write(self):
        for bucket in self._buckets:
            bucket.broadcast(self._modifier)
            bucket.take_over()
        for core in self._sharing():
            core.barrier()  # the modifier has written
        for engine, param in self._resting:
            core, index = registry.find(param)
            if core.shares_weights:
                is_writer = core.is_source(index, self._modifier)
                engine._weights.take_over_shared(core, index, is_writer)
                continue
            held = engine._back_end.give(local(param))
            core.broadcast_values(index, held, self._modifier)
            torch.autograd.graph.increment_version(local(param))
        for piece, _ in self._pieces:
            piece.share(self._modifier)

    def _refuse(self, kind):
        """Ranks that come to take the modifier's values hear that this one does not."""
        if self._modifier is None or self._sharing():
            return
        with contextlib.suppress(EngineError):
            for engine in self._engines[:1]:
                engine._core.refuse(f"the values of rank {self._modifier}", kind.__name__)

    def _sharing(self):
        """The engines to whose shared weights one rank writes."""
        if self._modifier is None:
            return []
        cores = {id(engine): engine._core for engine, _ in self._resting}
        return [core for core in cores.values() if core.shares_weights]


def register_external_parameter(module, parameter):
    """The module's forward uses a parameter of another module: it is whole then too."""
    if not isinstance(module, torch.nn.Module) or not isinstance(parameter, torch.nn.Parameter):
        raise ConfigError("register_external_parameter(module, parameter) takes these two")
    units.add_external(module, parameter)
    engine = registry.engine_of(parameter)
    if engine is not None and engine._sharded is not None:
        engine._sharded.use(module, parameter)


def unregister_external_parameter(module, parameter):
    """The module's forward uses that parameter no longer; it holds for engines that are made from
    now on."""
    units.remove_external(module, parameter)


def _in_order(numbered):
    return [numbered[number] for number in sorted(numbered)]


def _listed(params):
    if isinstance(params, torch.nn.Module):
        params = params.parameters()
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        params = [params]
    return list(params)
