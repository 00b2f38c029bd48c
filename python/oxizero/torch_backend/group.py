"""One rank's end of a group of ranks in `torch.distributed`.

Bytes move, of whatever dtype: nothing is summed here. Large buffers travel over the group of the
device's own back end; what ranks tell each other of the host's travels over gloo, so that a device
is not read for it.
"""

import time
from datetime import timedelta

import torch
from torch import distributed

from oxizero.torch_backend.device import at

# How long survivors wait for each other's word when something failed.
_WORD = timedelta(seconds=3)


class Group:
    """The process groups of some ranks, this one among them."""

    _made = 0

    def __init__(self, rank, ranks, device, timeout):
        self._rank, self._ranks = rank, list(ranks)
        self._device, self._timeout = device, timeout
        self._control = self._data = None
        # By ranks. Torch names a group after its ranks and the number of groups that are alive: one
        # that is destroyed and made again would meet what the store has of the first.
        self._splits = {}
        self._is_split = False
        # What this rank tells and all have told, and tensors of both: kept, as nearly all that
        # ranks tell each other is equally long.
        self._own, self._all, self._tensors = b"", b"", []
        self._packed = None
        if len(self._ranks) > 1:
            self._control = self._new("gloo")
            self._data = self._control if device.type == "cpu" else self._new(_backend(device))
        # Where survivors leave word. All ranks of a group make it at the same place in their order.
        Group._made += 1
        self._place = f"oxizero/{Group._made}/{'-'.join(map(str, self._ranks))}"

    def exchange(self, given):
        """Every member's bytes, equally many on each."""
        size = len(given)
        if size != len(self._own):
            self._own, self._all = bytearray(size), bytearray(size * len(self._ranks))
            self._tensors = [torch.frombuffer(b, dtype=torch.uint8) for b in (self._all, self._own)]
        self._own[:] = given
        _gather(*self._tensors, self._control)
        return [bytes(self._all[start : start + size]) for start in range(0, len(self._all), size)]

    def all_to_all(self, source, elements, target):
        """Of the members' equal parts of their sources that are this rank's: these elements, in
        the members' order."""
        target = _bytes(target)
        if target.numel() > 0:
            whole = at(source).view(len(self._ranks), -1)
            parts = whole[:, slice(*elements)]
            if not parts.is_contiguous():
                parts = self._side_by_side(parts, elements[1] == whole.shape[1])
            distributed.all_to_all_single(
                target, parts.view(-1).view(torch.uint8), group=self._data
            )

    def _side_by_side(self, parts, is_last):
        """A copy without gaps, in memory that is kept until the last piece: fresh memory takes
        longer than the copy."""
        size = parts.numel() * parts.element_size()
        if self._packed is None or self._packed.numel() < size:
            self._packed = torch.empty(size, dtype=torch.uint8, device=parts.device)
        packed = self._packed[:size].view(parts.dtype).view(parts.shape).copy_(parts)
        if is_last:
            self._packed = None
        return packed

    def all_gather(self, shard, full):
        """Every member's equal part; this rank's is `shard`, or lies in `full` already."""
        full = _bytes(full)
        size = full.numel() // len(self._ranks)
        start = self._ranks.index(self._rank) * size
        shard = full[start : start + size] if shard is None else _bytes(shard)
        if size > 0:
            _gather(full, shard, self._data)

    def broadcast(self, buffer, root):
        """What rank `root` of the world has."""
        buffer = _bytes(buffer)
        if buffer.numel() > 0:
            distributed.broadcast(buffer, root, group=self._data)

    def split(self, ranks):
        """The group of some members, which all of them ask for."""
        made = self._splits.get(tuple(ranks))
        if made is None:
            made = self._splits[tuple(ranks)] = Group(
                self._rank, ranks, self._device, self._timeout
            )
            made._is_split = True
        return made

    def abort(self, rank, why):
        """Tells the others why this rank gives up, and lets their operations fail, in this group
        and in those that were split from it."""
        for group in (self, *self._splits.values()):
            group._leave_word(f"aborted {rank}: {why}")
            group._disconnect()

    def explain(self, error):
        """Whose fault an error is, as far as the survivors can tell together: a kind (`dead`,
        `late`, `aborted`, or None), a rank, and a text. Those that have failed leave word; a
        rank that leaves none is the one that the others wait for."""
        text = str(error).splitlines()[0] if str(error) else repr(error)
        # Its frames hold the process group, whose connections end with it.
        error.__traceback__ = None
        if not isinstance(error, (RuntimeError, ValueError)):
            return None, 0, f"{type(error).__name__}: {text}"
        self._leave_word("failed")
        self._disconnect()
        words = self._words()
        self._leave_word("read", "/read")
        if self._rank == 0:
            self._await_readers(set(words) - {0})
        for rank, word in words.items():
            if word.startswith("aborted "):
                culprit, _, why = word.removeprefix("aborted ").partition(": ")
                return "aborted", int(culprit), why
        silent = [rank for rank in self._ranks if rank not in words]
        if not silent:
            return None, 0, text
        late = "imed out" in text or "imeout" in text
        return "late" if late else "dead", silent[0], text

    def close(self):
        """Leaves the group: operations of the others that wait for this rank fail. A group that was
        split from another lives as long as that one."""
        if not self._is_split:
            self._end()

    def _end(self):
        for made in self._splits.values():
            made._end()
        for group in {self._data, self._control} - {None}:
            if distributed.is_initialized():
                distributed.destroy_process_group(group)
        self._data = self._control = None

    def _new(self, backend):
        everyone = len(self._ranks) == distributed.get_world_size()
        return distributed.new_group(
            self._ranks,
            timeout=self._timeout,
            backend=backend,
            use_local_synchronization=not everyone,
        )

    def _disconnect(self):
        """A rank that has failed takes part in nothing more, and those that wait for it learn so
        when their connection ends."""
        for group in {self._data, self._control} - {None}:
            # What runs on a device; gloo has nothing to abort.
            getattr(group, "abort", lambda: None)()
        self._end()

    def _leave_word(self, word, of=""):
        try:
            _store().set(f"{self._place}/{self._rank}{of}", word)
        except Exception:
            pass  # the store went with the rank that keeps it

    def _await_readers(self, ranks):
        """Keeps the store for those who have left word, until they have read the others'."""
        keys = [f"{self._place}/{rank}/read" for rank in ranks]
        until = time.monotonic() + _WORD.total_seconds()
        while time.monotonic() < until and not _store().check(keys):
            time.sleep(0.02)

    def _words(self):
        """What each rank has said; waits a while for those that have said nothing."""
        words, until = {self._rank: "failed"}, time.monotonic() + _WORD.total_seconds()
        while len(words) < len(self._ranks) and time.monotonic() < until:
            for rank in self._ranks:
                key = f"{self._place}/{rank}"
                try:
                    if rank not in words and _store().check([key]):
                        words[rank] = _store().get(key).decode()
                except Exception:
                    # The store's keeper is gone: rank 0, unless a launcher keeps it. It may have
                    # left after its word, when it had waited for the others'.
                    alone = len(words) == 1
                    return dict.fromkeys(set(self._ranks) - {0}, "failed") if alone else words
            time.sleep(0.02)
        return words


def _backend(device):
    return "nccl" if device.type == "cuda" else distributed.get_default_backend_for_device(device)


def _store():
    return distributed.distributed_c10d._get_default_store()


def _bytes(elements):
    return at(elements).view(torch.uint8)


def _gather(full, shard, group):
    distributed.all_gather_into_tensor(full, shard, group=group)
