"""The back end of torch: tensors of any device, torch's operations, `torch.distributed`.

The engine's memory is flat tensors of bytes. It says which elements of them an operation is about,
as a tuple: the tensor, the name of their dtype, the first one, and the one after the last.
"""

from oxizero.torch_backend.device import Device
from oxizero.torch_backend.group import Group
from oxizero.torch_backend.rules import update
from oxizero.torch_backend.streams import Streams

__all__ = ["Device", "Group", "Streams", "update"]
