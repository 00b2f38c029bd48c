"""Memory of tensors that comes and goes, and what happens to those who use it while it is gone.

Torch has a message for a storage that must not be touched; without it, operations on a storage of
no bytes read whatever lies at address 0.
"""

import torch

_forbid = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)


# Whether torch refuses operations on memory that is there.
CAN_FORBID = _forbid is not None and _allow is not None


def free(storage, message):
    """Frees a storage's memory; operations on it raise a RuntimeError with this message."""
    allow(storage)
    storage.resize_(0)
    forbid(storage, message)


def allocate(storage, size):
    """Gives a freed storage memory of `size` bytes; what is in it is undefined."""
    allow(storage)
    storage.resize_(size)


def forbid(storage, message):
    """Operations on a storage's memory raise a RuntimeError with this message."""
    if CAN_FORBID:
        _forbid(storage._cdata, message)


def allow(storage):
    """Operations on a storage's memory are as on any."""
    if CAN_FORBID:
        _allow(storage._cdata)
