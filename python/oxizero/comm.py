"""Ranks and collectives, by DeepSpeed's names: what scripts call as `deepspeed.comm`.

Where `torch.distributed` is initialized every call is its. Where it is not, ranks meet by
themselves: `barrier`, `broadcast`, `all_reduce`, `all_gather` and `all_gather_into_tensor` then
work on CPU tensors of any dtype, for all ranks, and return when they are done. They gather all
ranks' tensors first, so they are for numbers to log, not for models. All else that
`torch.distributed` has is looked up there, and needs `torch.distributed.init_process_group`.
"""

import functools
import operator

import torch
import torch.distributed as _torch
from torch.distributed import ReduceOp
from torch.utils.dlpack import to_dlpack

from oxizero import _oxizero, world
from oxizero._oxizero import ConfigError
from oxizero.world import init_distributed

_ranks = None

# Bytes of the largest element, a complex128.
_ALIGN = 16

_COMBINE = {
    ReduceOp.SUM: operator.add,
    ReduceOp.AVG: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def is_available():
    """Whether there are collectives: always."""
    return True


def is_initialized():
    """Whether `init_distributed` or `initialize` was called, or `torch.distributed` is
    initialized."""
    return _is_torchs() or world.is_initialized()


def get_rank(group=None):
    """This process's rank in the group, by default among all."""
    return _torch.get_rank(group) if _is_torchs() else _native(group).rank


def get_world_size(group=None):
    """Ranks in the group, by default all."""
    return _torch.get_world_size(group) if _is_torchs() else _native(group).size


def get_local_rank():
    """This process's rank on its machine."""
    return world.place().local_rank


def barrier(group=None, async_op=False, **options):
    """Returns when every rank has called it."""
    if _is_torchs():
        return _torch.barrier(group, async_op, **options)
    _native(group)
    _meet().barrier()
    return _done(async_op)


def broadcast(tensor, src, group=None, async_op=False):
    """Overwrites the tensor with rank `src`'s."""
    if _is_torchs():
        return _torch.broadcast(tensor, src, group, async_op)
    _native(group)
    tensor.copy_(_gather(tensor)[src])
    return _done(async_op)


def all_reduce(tensor, op=ReduceOp.SUM, group=None, async_op=False):
    """Overwrites the tensor with all ranks', combined in rank order; 16-bit ones in float32."""
    if _is_torchs():
        return _torch.all_reduce(tensor, op, group, async_op)
    _native(group)
    if op not in _COMBINE:
        raise ConfigError(f"all_reduce(op={op}): there are SUM, AVG, PRODUCT, MIN and MAX")
    is_average = op == ReduceOp.AVG
    if is_average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"all_reduce(op=AVG) of {tensor.dtype}: it is no integer; use SUM")
    parts = _gather(tensor)
    if tensor.dtype in (torch.bfloat16, torch.float16):  # rounded once, at the end
        parts = [part.float() for part in parts]
    combined = functools.reduce(_COMBINE[op], parts)
    tensor.copy_(combined / get_world_size() if is_average else combined)
    return _done(async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False):
    """Overwrites the list's tensors with all ranks', in rank order."""
    if _is_torchs():
        return _torch.all_gather(tensor_list, tensor, group, async_op)
    _native(group)
    for target, source in zip(tensor_list, _gather(tensor), strict=True):
        target.copy_(source)
    return _done(async_op)


def all_gather_into_tensor(output_tensor, input_tensor, group=None, async_op=False):
    """Overwrites the output with all ranks' inputs, one after the other."""
    if _is_torchs():
        return _torch.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    _native(group)
    output_tensor.view(-1).copy_(torch.cat([part.view(-1) for part in _gather(input_tensor)]))
    return _done(async_op)


class _Done:
    """The handle of a collective that has ended."""

    def wait(self):
        return True

    def is_completed(self):
        return True


def _done(async_op):
    return _Done() if async_op else None


def _is_torchs():
    return _torch.is_available() and _torch.is_initialized()


def _native(group):
    if group is not None:
        raise ConfigError(
            "a group of ranks is torch.distributed's; call torch.distributed.init_process_group "
            "before, and every collective is torch's"
        )
    return world.place()


def _meet():
    global _ranks
    if _ranks is None:
        _ranks = _oxizero.Ranks(world.meeting("comm"))
    return _ranks


def _gather(tensor):
    """Every rank's tensor, in rank order."""
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"a collective of a tensor on {tensor.device} is torch.distributed's; call "
            "torch.distributed.init_process_group before"
        )
    own = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # The bytes travel as floats, which nothing is done with; elements begin where they are aligned.
    size = own.numel()
    shard = torch.zeros((size // _ALIGN + 1) * _ALIGN, dtype=torch.uint8)
    shard[:size] = own
    every = torch.empty(get_world_size(), shard.numel(), dtype=torch.uint8)
    floats = [to_dlpack(given.view(-1).view(torch.float32)) for given in (shard, every)]
    _meet().all_gather(*floats)
    return [part[:size].view(tensor.dtype).view(tensor.shape) for part in every]


def __getattr__(name):
    return getattr(_torch, name)
