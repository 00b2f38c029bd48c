"""Streams of work on a device, for operations that run on a thread beside the caller's.

A call returns before the device has done what it asks for. What one stream is asked for is done in
that order; between two streams only an event orders anything: it is recorded on the one, and the
other waits for it, on the device.
"""

import torch


def of(device):
    """The streams of a device; None of one that does everything in the order of the calls."""
    module = None if device.type == "cpu" else torch.get_device_module(device)
    return Streams(device, module) if hasattr(module, "set_stream") else None


class Streams:
    """The caller's stream, and one of a communication thread's own. `module` is torch's of the
    device, such as `torch.cuda`."""

    def __init__(self, device, module):
        self._device, self._module = device, module
        self._beside = module.Stream(device)

    def begin(self):
        """The calling thread's work is the communication thread's stream's from here on."""
        self._module.set_stream(self._beside)

    def mark(self):
        """Where the calling thread's stream is."""
        event = self._module.Event()
        event.record(self._current())
        return event

    def wait(self, event):
        """What the calling thread asks for from here on begins after the event."""
        self._current().wait_event(event)

    def let_go(self, tensor):
        """The calling thread lets go of memory, which is nobody else's before its stream has done
        what it was asked for so far. It costs nothing where the memory is of that stream."""
        tensor.record_stream(self._current())

    def _current(self):
        return self._module.current_stream(self._device)
