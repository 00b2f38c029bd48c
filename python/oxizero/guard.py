"""Memory of tensors that comes and goes, and what happens to those who use it while it is gone.

Torch has a message for a storage that must not be touched; without it, operations on a storage of
no bytes read whatever lies at address 0.
"""

import torch

_forbid = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)


def free(storage, message):
    """Frees a storage's memory; operations on it raise a RuntimeError with this message."""
    storage.resize_(0)
    if _forbid is not None and _allow is not None:
        _forbid(storage._cdata, message)


def allocate(storage, size):
    """Gives a freed storage memory of `size` bytes; what is in it is undefined."""
    if _forbid is not None and _allow is not None:
        _allow(storage._cdata)
    storage.resize_(size)
