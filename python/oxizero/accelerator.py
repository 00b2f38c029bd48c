"""The device, by the names of DeepSpeed's `get_accelerator()`: a GPU if torch has one, or the
CPU. Scripts ask it where to put a model and its inputs."""

import torch


class _Accelerator:
    """What scripts ask for. A CPU has one device, no memory of its own, and nothing to wait for."""

    def __init__(self):
        self._gpu = torch.cuda if torch.cuda.is_available() else None

    def device_name(self, device_index=None):
        name = "cuda" if self._gpu else "cpu"
        return name if device_index is None or not self._gpu else f"{name}:{device_index}"

    def current_device_name(self):
        return self.device_name(self.current_device())

    def device(self, device_index=None):
        return torch.device(self.device_name(device_index))

    def current_device(self):
        return self._gpu.current_device() if self._gpu else 0

    def set_device(self, device_index):
        if self._gpu:
            self._gpu.set_device(device_index)

    def device_count(self):
        return self._gpu.device_count() if self._gpu else 1

    def is_available(self):
        return True

    def communication_backend_name(self):
        return "nccl" if self._gpu else "native"

    def synchronize(self, device_index=None):
        if self._gpu:
            self._gpu.synchronize(device_index)

    def empty_cache(self):
        if self._gpu:
            self._gpu.empty_cache()

    def memory_allocated(self, device_index=None):
        return self._gpu.memory_allocated(device_index) if self._gpu else 0

    def max_memory_allocated(self, device_index=None):
        return self._gpu.max_memory_allocated(device_index) if self._gpu else 0

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def is_bf16_supported(self):
        return self._gpu.is_bf16_supported() if self._gpu else True

    def is_fp16_supported(self):
        return True


_accelerator = None


def get_accelerator():
    """The device that models are trained on."""
    global _accelerator
    if _accelerator is None:
        _accelerator = _Accelerator()
    return _accelerator
