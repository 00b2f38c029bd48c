"""Parameters that ranks do not hold alike: tensor parallelism, experts, DTensors.

What a parameter is marked with becomes the engine's mesh; what a DTensor holds on this rank is the
parameter, as the engine knows it.
"""

import math
import re
import sys

import torch
from torch.utils.weak import WeakIdKeyDictionary

from oxizero import _oxizero, world
from oxizero._oxizero import ConfigError, EngineError

_marks = WeakIdKeyDictionary()


def mark_split(param, axis, group):
    """This rank's part of a tensor that the ranks of `group` hold in equal parts, consecutive along
    dimension `axis`. They work on the same micro-batches, as in tensor parallelism.

    `group` is a torch.distributed process group, a list of global ranks in the order of the parts,
    or a name of a dimension of the DeviceMesh that is given to `initialize(mesh_param=...)`.
    """
    _mark(param, "part", _dimension(param, axis), group)


def mark_expert(param, group, axis=None):
    """An expert of this rank's own: each of `group`, as for `mark_split`, has another, and gives it
    the gradient of all the tokens that it was sent. Where a parameter holds several experts, which
    lie in a row with the others' along a dimension, `axis` is that dimension."""
    _mark(param, "expert", None if axis is None else _dimension(param, axis), group)


def _dimension(param, axis):
    if not -param.dim() <= axis < param.dim():
        raise ConfigError(f"axis = {axis} of a parameter of shape {tuple(param.shape)}")
    return axis % param.dim()


def _mark(param, holds, dim, group):
    if is_dtensor(param):
        raise ConfigError("a DTensor says itself how it is split; leave out the mark")
    _marks.setdefault(param, []).append((holds, dim, group))


def is_dtensor(tensor):
    """Whether it is one, without an import that takes seconds."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor):
    """What this rank holds of a tensor: of a DTensor its part, of any other all of it."""
    # The tensor itself, so that its memory can be replaced: to_local() of a parameter is a view.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def local_grad(param, grad, name):
    """This rank's part of a gradient, placed as the parameter is."""
    if not is_dtensor(grad):
        return grad
    if grad.device_mesh != param.device_mesh:
        raise EngineError(f"the gradient of `{name}` is on another DeviceMesh than it")
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()


def arrange(module, mesh_param=None, mpu=None):
    """How the ranks are arranged so that all that a module's parameters say is true."""
    _refuse_wrapped(module)
    here = world.place()
    groups = _Groups(mesh_param, mpu)
    marks = groups.of_all()
    for name, param in module.named_parameters():
        for holds, dim, ranks in _said(name, param, groups):
            marks.append({"param": name, "holds": holds, "dim": dim, "ranks": ranks})
    arrangement = _oxizero.Arrangement(here.rank, here.size, marks)
    groups.check(arrangement)
    return arrangement


def _refuse_wrapped(module):
    fsdp, parallel = "torch.distributed.fsdp", "torch.nn.parallel"
    kinds = [(fsdp, "FSDPModule"), (fsdp, "FullyShardedDataParallel")]
    for place, kind in kinds + [(parallel, "DistributedDataParallel")]:
        known = getattr(sys.modules.get(place), kind, None)
        if known is not None and any(isinstance(inner, known) for inner in module.modules()):
            raise ConfigError(f"a model in {kind} is refused: the engine does what that does")


def _said(name, param, groups):
    """What a parameter says: for each group what a rank holds, the dimension, and the ranks."""
    if is_dtensor(param):
        yield from _placed(name, param)
    for holds, dim, group in _marks.get(param, ()):
        yield holds, dim, groups.ranks(f"the group of `{name}`", group)
    if param in _marks:
        return
    if getattr(param, "tensor_model_parallel", False):
        if getattr(param, "partition_stride", 1) != 1:
            raise ConfigError(f"`{name}`.partition_stride = {param.partition_stride} is refused")
        yield "part", param.partition_dim, groups.tensor(name)
    elif getattr(param, "model_parallel", False):
        raise ConfigError(
            f"`{name}`.model_parallel does not say along which dimension it is split; call "
            "oxizero.mark_split"
        )
    if getattr(param, "allreduce", True) is False:
        yield "expert", None, groups.expert(name, getattr(param, "group_name", None))


def _placed(name, param):
    for dim, placement in enumerate(param.placements):
        ranks = _row(param.device_mesh, dim)
        if placement.is_replicate():
            yield "same", None, ranks
            continue
        if not placement.is_shard() or type(placement).__name__ != "Shard":
            raise ConfigError(f"`{name}` is placed {placement}; the engine takes Shard, Replicate")
        cuts = [
            param.device_mesh.size(other)
            for other, placed in enumerate(param.placements)
            if placed.is_shard(placement.dim)
        ]
        strides = [
            ranks[1] - ranks[0]
            for other, placed in enumerate(param.placements)
            if placed.is_shard(placement.dim)
            and len(ranks := _row(param.device_mesh, other)) > 1
        ]
        if strides != sorted(strides, reverse=True):
            raise ConfigError(
                f"dimension {placement.dim} of `{name}` is split along several dimensions of "
                f"{param.device_mesh}, of which a later one has ranks further apart; make the mesh "
                "row-major"
            )
        size, parts = param.shape[placement.dim], math.prod(cuts)
        if size % parts:
            raise ConfigError(
                f"dimension {placement.dim} of `{name}`, of {size}, is not split evenly over "
                f"{parts} ranks"
            )
        yield "part", placement.dim, ranks


def _row(mesh, dim):
    """The ranks that differ from this one along one dimension of a DeviceMesh."""
    at = mesh.get_coordinate()
    if at is None:
        raise ConfigError(f"rank {world.place().rank} is not in {mesh}")
    return mesh.mesh[tuple([*at[:dim], slice(None), *at[dim + 1 :]])].tolist()


class _Groups:
    """The process groups that names stand for."""

    def __init__(self, mesh, mpu):
        if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
            raise ConfigError(
                f"mesh_param = {mesh!r} is refused; give a torch DeviceMesh, or mark parameters "
                "with oxizero.mark_split and mark_expert"
            )
        self.mesh, self.mpu = mesh, mpu
        for asked in ("get_pipe_parallel_world_size", "get_pipeline_model_parallel_world_size",
                      "get_sequence_parallel_world_size", "get_context_parallel_world_size"):
            size = self._mpu(asked)
            if size is not None and size > 1:
                raise ConfigError(f"mpu.{asked}() = {size} is refused: the engine has data, tensor "
                                  "and expert parallelism")

    def of_all(self):
        """What parameters without a mark do."""
        ranks = self._tensor()
        return [] if ranks is None else [
            {"param": None, "holds": "same", "dim": None, "ranks": ranks}
        ]

    def tensor(self, name):
        """The ranks that share the tensor of a parameter that Megatron has marked."""
        ranks = self._tensor()
        if ranks is None:
            raise ConfigError(
                f"`{name}`.tensor_model_parallel is set, and initialize() was given no mpu; call "
                "oxizero.mark_split"
            )
        return ranks

    def expert(self, name, group):
        """The ranks among which DeepSpeed's name of a group shares experts."""
        if isinstance(group, str) and group in self._dimensions():
            return self.ranks(name, group)
        size = re.fullmatch(r"ep_size_(\d+)", group or "")
        # With tensor parallelism DeepSpeed's groups of this name are others.
        if size is None or int(size[1]) < 1 or self._tensor() is not None:
            raise ConfigError(
                f"`{name}`.allreduce is False, and its group_name = {group!r} names no group "
                "here; call oxizero.mark_expert"
            )
        size, rank = int(size[1]), world.place().rank
        return list(range(rank // size * size, (rank // size + 1) * size))

    def ranks(self, what, group):
        """The global ranks of a group."""
        if isinstance(group, str):
            if group not in self._dimensions():
                raise ConfigError(
                    f"{what} = {group!r} is no dimension of mesh_param, whose dimensions are "
                    f"{self._dimensions()}"
                )
            return _row(self.mesh, self._dimensions().index(group))
        if hasattr(group, "rank"):
            return torch.distributed.get_process_group_ranks(group)
        try:
            ranks = [int(rank) for rank in group]
        except (TypeError, ValueError):
            raise ConfigError(
                f"{what} = {group!r} is neither a process group, nor a list of ranks, nor a name"
            ) from None
        if min(ranks, default=0) < 0:
            raise ConfigError(f"{what} = {ranks} has a negative rank; ranks are counted from 0")
        return ranks

    def check(self, arrangement):
        """Refuses an arrangement that is not the mpu's."""
        group = self._mpu("get_data_parallel_group")
        if group is None:
            return
        told = self.ranks("mpu.get_data_parallel_group()", group)
        if told != arrangement.batch_group:
            raise ConfigError(
                f"mpu.get_data_parallel_group() has the ranks {told}, but those that work on "
                f"batches of their own beside this rank are {arrangement.batch_group}"
            )

    def _dimensions(self):
        return list(self.mesh.mesh_dim_names or ()) if self.mesh is not None else []

    def _tensor(self):
        for asked in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
            group = self._mpu(asked)
            if group is not None:
                return self.ranks(f"mpu.{asked}()", group)
        return None

    def _mpu(self, asked):
        told = getattr(self.mpu, asked, None)
        return None if told is None else told()
