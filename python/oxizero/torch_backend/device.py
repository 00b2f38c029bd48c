"""The kernels of `oxizero-device`, on tensors of one device.

Arithmetic is in f32 and rounds once, to nearest even, as the host's does; its results are the
host's to the bit where the device's f32 is IEEE's, but for the sums of a norm, which torch adds in
f64 in an order of its own. On a GPU torch divides by a number of the host by multiplying with its
inverse, so divisors are tensors.
"""

import torch

# Elements that are widened at once, to bound what that takes.
BLOCK = 1 << 22


def at(elements):
    """The tensor of some elements of a flat tensor of bytes."""
    memory, dtype, start, end = elements
    return memory.view(getattr(torch, dtype))[start:end]


def blocks(*tensors):
    """The same stretches of tensors of one length, at most `BLOCK` elements each."""
    numel = tensors[0].numel()
    for start in range(0, numel, BLOCK):
        yield tuple(tensor[start : min(start + BLOCK, numel)] for tensor in tensors)


def scalar(value, like):
    """A number as an f32 tensor that divides as any element does."""
    return torch.full((1,), value, dtype=torch.float32, device=like.device)


class Device:
    """A torch device, and what is computed there."""

    def __init__(self, device):
        self.device = device

    def give(self, tensor):
        """A tensor as the engine takes it: contiguous and without a graph, as flat bytes."""
        name = str(tensor.dtype).removeprefix("torch.")
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return self, flat, name, tuple(tensor.shape)

    def tensor(self, elements, shape):
        """A tensor in the engine's memory."""
        return at(elements).view(shape)

    def alloc(self, size):
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def read(self, source):
        """The elements' bytes, on the host."""
        source = at(source).view(torch.uint8)
        read = bytearray(source.numel())
        if read:
            torch.frombuffer(read, dtype=torch.uint8).copy_(source)
        return bytes(read)

    def write(self, source, target):
        if source:
            source = torch.frombuffer(bytearray(source), dtype=torch.uint8)
            at(target).view(torch.uint8).copy_(source)

    def fill(self, target, value):
        at(target).fill_(value)

    @torch.no_grad()
    def cast(self, source, target):
        at(target).copy_(at(source))

    @torch.no_grad()
    def adopt(self, source, target):
        for given, kept in blocks(at(source), at(target)):
            rounded = kept.to(given.dtype).float().view(torch.int32)
            given = given.float()
            kept.copy_(torch.where(given.view(torch.int32) != rounded, given, kept))

    @torch.no_grad()
    def tree_sum(self, inputs, target, adds):
        for target, *parts in blocks(at(target), *map(at, inputs)):
            total = _tree(parts)
            target.copy_(target.float() + total if adds else total)

    @torch.no_grad()
    def divide(self, grad, divisor):
        for part, in blocks(at(grad)):
            part.copy_(part.float() / scalar(divisor, part))

    @torch.no_grad()
    def measure(self, grads, divisor, power, weights):
        """The sums of the quotients' powers, or their largest magnitudes, and what tells each of
        `weights` from others, as numbers of the host: what a step reads of the device."""
        found = [size for run in _runs(grads) for size in _measured(run, divisor, power)]
        # Halves of 32 bits are exact in f64.
        halves = [half for elements in weights for half in _checksum(at(elements))]
        told = torch.stack(found + halves).tolist() if found or halves else []
        sizes, halves = told[: len(found)], [int(half) for half in told[len(found) :]]
        return sizes, [high << 32 | low for high, low in zip(halves[::2], halves[1::2])]


def _checksum(values):
    """The high and the low half of the sum of mixed words, each with its place in it, modulo 2^64:
    one bit more or less, or another order, makes another one."""
    flat = values.view(torch.uint8)
    # Eight bytes at a time; what is left over counts with zeros behind it.
    whole = flat.numel() // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    rest[: flat.numel() - whole] = flat[whole:]
    total = _mixed(rest.view(torch.int64), whole // 8).sum()
    for start in range(0, whole, 2 * BLOCK):
        words = flat[start : min(start + 2 * BLOCK, whole)].view(torch.int64)
        total = total + _mixed(words, start // 8).sum()
    return [(total >> 32 & 0xFFFFFFFF).double(), (total & 0xFFFFFFFF).double()]


def _mixed(words, first):
    """Each word and its place, spread over 64 bits, of which none is lost: factors are odd."""
    mixed = torch.arange(first, first + words.numel(), device=words.device)
    mixed.mul_(-0x61C8864680B583EB).add_(words)
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        mixed.mul_(factor)
        mixed ^= mixed >> 32 & 0xFFFFFFFF
    return mixed


def _tree(parts):
    """The balanced tree over the parts, in f32."""
    if len(parts) == 1:
        return parts[0].float()
    # The largest power of two below their number.
    cut = 1 << (len(parts) - 1).bit_length() - 1
    return _tree(parts[:cut]) + _tree(parts[cut:])


def _runs(elements):
    """Those that lie beside each other, listed together: what is done to every element is done at
    once, to at most `BLOCK` of them unless a single one has more."""
    runs, numel = [], 0
    for one in elements:
        memory, dtype, start, end = one
        follows = bool(runs) and runs[-1][-1][0] is memory and runs[-1][-1][1::2] == (dtype, start)
        numel += end - start
        if follows and numel <= BLOCK:
            runs[-1].append(one)
        else:
            runs.append([one])
            numel = end - start
    return runs


def _measured(run, divisor, power):
    """The size of each gradient of a run."""
    numels = [end - start for _, _, start, end in run]
    memory, dtype, start, _ = run[0]
    values = at((memory, dtype, start, start + sum(numels)))
    if len(run) > 1:
        return [_total(part, power) for part in _powers(values, divisor, power).split(numels)]
    totals = [_total(_powers(part, divisor, power), power) for part, in blocks(values)]
    return [_total(torch.stack(totals), power)]


def _powers(values, divisor, power):
    sizes = (values.float() / scalar(divisor, values)).abs_().double()
    if power in (None, 1):
        return sizes
    return sizes * sizes if power == 2 else sizes * sizes * sizes


def _total(powers, power):
    return powers.max() if power is None else powers.sum()
