"""What the engine itself costs through Python hooks, for each of many small parameters.

    python bench/overhead.py                                      # 10,000 of 64 elements
    python bench/overhead.py --params 100 --rounds 1 --engines "oxizero 2"

`compute` is forward and backward alone, with a hook that drops each gradient. What an engine takes
above it in a micro-batch, and all of its step, is its own.
"""

import argparse
import statistics
import time

import rounds
from ranks import Ranks

COMPUTE = "compute"
ENGINES = [f"oxizero {stage}" for stage in (1, 2, 3)]
MICRO_BATCH, STEP = "micro_batch", "step"


class Trainer:
    """One rank of one engine."""

    def __init__(self, rank, name, setting):
        import torch

        torch.set_num_threads(1)
        import engines
        import models

        engines.load(name)
        numel, count = setting["numel"], setting["params"]
        tensors = (torch.nn.Parameter(torch.ones(numel)) for _ in range(count))
        self.engine = engines.make(name, models.Joined(tensors), setting)
        self.batch = torch.tensor(1.0 + rank)
        self.step()

    def step(self):
        """Seconds of a window's micro-batch, and of its step."""
        begin = time.perf_counter()
        self.engine.micro_batch(self.batch, True)
        middle = time.perf_counter()
        self.engine.step()
        return middle - begin, time.perf_counter() - middle


def measure(name, setting):
    """One round of an engine, in new processes; microseconds a parameter, of the slowest rank."""
    ranks = Ranks(setting["ranks"], 1, Trainer, name, setting)
    try:
        steps = [map(max, zip(*ranks.all("step"), strict=True)) for _ in range(setting["steps"])]
        halves = zip(*steps, strict=True)
        medians = [1e6 * statistics.median(half) / setting["params"] for half in halves]
    finally:
        ranks.end()
    return dict(zip((MICRO_BATCH, STEP), medians, strict=True))


def added(one, compute):
    """What an engine takes above forward and backward alone."""
    return one[MICRO_BATCH] + one[STEP] - compute[MICRO_BATCH]


def rows(results, setting):
    """What was measured, one thing a row, as the bench of the command has it."""
    compute = results[COMPUTE]
    for name, one in results.items():
        total = one[MICRO_BATCH] + one[STEP]
        whats = {"total": total}
        if name != COMPUTE:
            whats["added"] = added(one, compute)
        for what, median in whats.items():
            yield {
                "name": f"overhead/{name.replace(' ', '-')}/{what}",
                "ranks": setting["ranks"],
                "median": median,
                "unit": "us/param",
                "reference": COMPUTE,
                "ratio": median / compute[MICRO_BATCH],
            }


def lines(results):
    compute = results[COMPUTE]
    for name, one in results.items():
        more = "" if name == COMPUTE else f"{added(one, compute):.2f}"
        yield [name, *(f"{one[what]:.2f}" for what in (MICRO_BATCH, STEP)), more]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=int, default=10_000)
    parser.add_argument("--numel", type=int, default=64, help="elements of each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15, help="measured steps a round")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, by commas")
    parser.add_argument("--json", metavar="FILE", help="adds a JSON object a line to a file")
    given = parser.parse_args()
    setting = {name: getattr(given, name) for name in ("params", "numel", "ranks", "steps")}
    setting |= {"accumulation": 1, "dtype": "f32", "wire": None}
    names = [COMPUTE, *given.engines.split(",")]
    engines = {name: lambda name=name: measure(name, setting) for name in names}
    results = rounds.interleave(engines, given.rounds)
    title = f"{given.params} parameters of {given.numel} elements, f32, {given.ranks} ranks"
    head = ["engine", "micro-batch us a parameter", "step us", "added us"]
    rounds.tell(title, head, lines(results), rows(results, setting), given.json)


if __name__ == "__main__":
    main()
