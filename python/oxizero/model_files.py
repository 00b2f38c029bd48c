"""Files of a model's weights alone, which plain torch and others read: DeepSpeed's
`save_16bit_model`."""

import os

import torch

from oxizero import _oxizero
from oxizero._oxizero import EngineError
from oxizero.log import log_dist, logging


class ModelFiles:
    """Methods of the engine."""

    def save_16bit_model(
        self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False
    ):
        """Writes the model's weights, in the dtypes that the model has them in, and its buffers to
        one file of `save_dir`: what `torch.load` reads, or safetensors if the name ends so. A
        collective call; rank 0 writes. The file is there whole, or is what it was before.

        Returns whether it was written: in stage 3, only if the configuration says
        `stage3_gather_16bit_weights_on_model_save`.
        """
        path = os.path.join(os.fspath(save_dir), save_filename)
        if self._core.first_in_parts is not None:
            raise EngineError(
                f"save_16bit_model: ranks hold parts of `{self._core.first_in_parts}`, or tensors "
                "of their own; call save_checkpoint(), and then `oxizero convert DIR --to "
                "safetensors OUT`, which joins parts"
            )
        if self._sharded is not None and not self.config.gathers_on_save:
            log_dist(
                f"`{path}` is not written: the weights are sharded, and "
                "`zero_optimization.stage3_gather_16bit_weights_on_model_save` is not true",
                ranks=[0],
                level=logging.WARNING,
            )
            return False
        copy = _Copies(is_kept=self.global_rank == 0)
        state = self._whole_state(copy)
        if exclude_frozen_parameters:
            named = self.module.named_parameters(remove_duplicate=False)
            for name in [name for name, param in named if not param.requires_grad]:
                state.pop(name, None)
        failure = None
        try:
            if self.global_rank == 0:
                _write(path, {name: copy.of_entry(value) for name, value in state.items()})
        except BaseException as error:
            failure = error
        failed = self._core.first_failed("save_16bit_model", failure is None)
        if failure is not None:
            raise failure
        if failed is not None:
            raise EngineError(f"save_16bit_model: rank {failed} did not write, and says why")
        return True

    def save_fp16_model(self, save_dir, save_filename="pytorch_model.bin"):
        """The same as `save_16bit_model`."""
        return self.save_16bit_model(save_dir, save_filename)

    def zero_gather_16bit_weights_on_model_save(self):
        """Whether `save_16bit_model` writes a file in stage 3."""
        return self.config.gathers_on_save

    def _whole_state(self, copy):
        if self._sharded is None:
            return self.module.state_dict()
        return self._sharded.state_dict(self.module, copy.of_param)


class _Copies:
    """What a state dict holds, on the host, with memory of its own; what shares memory there shares
    it here. Where nothing is to be kept, tensors have shapes and no elements."""

    def __init__(self, is_kept):
        self._is_kept = is_kept
        self._of_params = {}
        self._of_memory = {}

    def of_param(self, param):
        """Of a parameter that is whole only now."""
        if id(param) not in self._of_params:
            held = param.detach()
            copy = held.to("cpu", copy=True) if self._is_kept else held.to("meta")
            self._of_params[id(param)] = (copy, param)
        return self._of_params[id(param)][0]

    def of_entry(self, value):
        """Of an entry of the state dict."""
        if not isinstance(value, torch.Tensor):
            return value
        memory = _memory(value)
        if memory not in self._of_memory:
            held = value.detach()
            own = held.numel() * held.element_size()
            is_own = held.device.type == "cpu" and held.untyped_storage().nbytes() == own
            self._of_memory[memory] = (held if is_own else held.to("cpu", copy=True), value)
        return self._of_memory[memory][0]


def _memory(tensor):
    """The same for two tensors only if they are one."""
    storage = tensor.untyped_storage()._cdata if tensor.numel() > 0 else id(tensor)
    return storage, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _write(path, state):
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    if path.endswith(".safetensors"):
        _write_safetensors(path, state)
        return
    aside = os.path.join(folder, f".{os.path.basename(path)}.partial-{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        if os.path.exists(aside):
            os.remove(aside)
        raise
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_safetensors(path, state):
    """What several names have is written once, under the first: the others are in the file's
    metadata, as `safetensors.torch.save_model` writes them."""
    names, entries, tensors = {}, {"format": "pt"}, []
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise EngineError(
                f"save_16bit_model: `{name}` is {type(tensor).__name__}, no tensor, which "
                "safetensors does not hold; choose a name that ends with .bin"
            )
        first = names.setdefault(id(tensor), name)
        if first == name:
            tensors.append(described(name, tensor))
        else:
            entries[name] = first
    _oxizero.write_safetensors(path, tensors, entries)


def described(name, tensor):
    """A tensor as files take it: its name, dtype, shape, and bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return name, dtype, tuple(tensor.shape), torch.utils.dlpack.to_dlpack(flat)
