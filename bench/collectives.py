"""Collectives: oxizero's beside gloo's, each beside plain copies of the same bytes.

    python bench/collectives.py                                   # 16 MiB and 256 MiB
    python bench/collectives.py --sizes 64KiB --rounds 1

A size is the bytes of the whole tensor in the dtype that travels. `memcpy` is a copy of as many by
every rank at once. oxizero's are measured by its command, `cargo build --release -p oxizero-cli`;
gloo's through torch.distributed. A reduce-scatter of bf16 sums into f32 in oxizero, and into bf16
in gloo.
"""

import argparse
import ctypes
import time

import command
import rounds
from ranks import Ranks

MEMCPY = "memcpy"
WHAT = [MEMCPY, "reduce_scatter/f32", "reduce_scatter/bf16", "all_reduce/f32", "all_gather/f32"]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Gloo:
    """One rank of gloo."""

    def __init__(self, rank, ranks):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.torch, self.dist, self.ranks = torch, dist, ranks

    def measure(self, size):
        """Seconds by what was done to tensors of so many bytes."""
        whole = self.torch.ones(size // 4)
        other = self.torch.ones(size // 4)
        narrow = self.torch.ones(size // 2, dtype=self.torch.bfloat16)
        part, narrow_part = (all_.chunk(self.ranks)[0].clone() for all_ in (whole, narrow))
        deeds = [
            lambda: ctypes.memmove(other.data_ptr(), whole.data_ptr(), size),
            lambda: self.dist.reduce_scatter_tensor(part, whole),
            lambda: self.dist.reduce_scatter_tensor(narrow_part, narrow),
            lambda: self.dist.all_reduce(whole),
            lambda: self.dist.all_gather_into_tensor(other, part),
        ]
        return {what: self._timed(deed) for what, deed in zip(WHAT, deeds, strict=True)}

    def _timed(self, deed):
        self.dist.barrier()
        begin = time.perf_counter()
        deed()
        return time.perf_counter() - begin


def of_gloo(ranks, size):
    """One round of gloo: each time is the slowest rank's."""
    times = ranks.all("measure", size)
    return {what: max(one[what] for one in times) for what in WHAT}


def of_oxizero(ranks, label):
    """One round of oxizero: the middle one of three, the first of which meets new memory."""
    rows = command.bench("collectives", "--sizes", label, "--ranks", ranks, rounds=3)
    return {what: rows[f"{what}/{label}"]["median"] for what in WHAT}


def rows(results, label, ranks):
    """What was measured, one thing a row, as the bench of the command has it."""
    for name, one in results.items():
        for what, seconds in one.items():
            yield {
                "name": f"{name}/{what}/{label}",
                "ranks": ranks,
                "median": seconds,
                "unit": "s",
                "reference": f"{name}/{MEMCPY}/{label}",
                "ratio": seconds / one[MEMCPY],
            }


def lines(results):
    for what in WHAT:
        for name, one in results.items():
            over = f"{one[what] / one[MEMCPY]:.2f}"
            yield [name, what, f"{1e3 * one[what]:.3f}", over]


def in_bytes(label):
    """The bytes of a size such as 256MiB."""
    return int(label[:-3]) * UNITS[label[-3:]]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="16MiB,256MiB", help="in KiB, MiB or GiB, by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="adds a JSON object a line to a file")
    given = parser.parse_args()
    gloo = Ranks(given.ranks, 1, Gloo, given.ranks)
    try:
        for label in given.sizes.split(","):
            engines = {
                "gloo": lambda label=label: of_gloo(gloo, in_bytes(label)),
                "oxizero": lambda label=label: of_oxizero(given.ranks, label),
            }
            results = rounds.interleave(engines, given.rounds)
            title = f"{label}, {given.ranks} ranks, {given.rounds} rounds"
            head = ["engine", "collective", "ms", "over memcpy"]
            told = rows(results, label, given.ranks)
            rounds.tell(title, head, lines(results), told, given.json)
    finally:
        gloo.end()


if __name__ == "__main__":
    main()
