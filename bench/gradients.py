"""Reading all gradients: one call for the model beside a loop over parameters, oxizero's and
DeepSpeed's.

    python bench/gradients.py                            # 134 M elements of f32
    python bench/gradients.py --numel 100000 --tensors 10 --engines "oxizero 2"

Each time is the slowest rank's, the median over rounds that go through the engines one after the
other. Beside them: one all-gather by gloo of as many bytes. DeepSpeed has no call for the model.
"""

import argparse
import json
import os
import statistics
import sys
import time

from ranks import Failed, Ranks

ENGINES = [
    *(f"deepspeed {stage}" for stage in (1, 2, 3)),
    *(f"oxizero {stage}" for stage in range(4)),
    *(f"oxizero {stage} torch" for stage in range(4)),
]


class Reader:
    """One rank of one engine that holds the gradients of one backward."""

    def __init__(self, rank, name, setting):
        import torch

        torch.set_num_threads(setting["threads"])
        import engines
        import models

        engines.load(name)
        numel = setting["numel"] // setting["tensors"]
        tensors = (torch.nn.Parameter(torch.zeros(numel)) for _ in range(setting["tensors"]))
        self.model = models.Products(tensors)
        self.engine = engines.make(name, self.model, setting)
        self.engine.micro_batch(torch.tensor(1.0 + rank), True)
        self.numel = numel * setting["tensors"]
        self.ranks = setting["ranks"]
        self.load(name)

    def load(self, name):
        """The package's functions."""
        import importlib

        package = importlib.import_module(f"{name.split()[0]}.utils")
        self.one = package.safe_get_full_grad
        self.whole = getattr(package, "safe_get_full_model_grads", None)

    def loop(self):
        """Seconds of reading every parameter's gradient by a call of its own."""
        return self._timed(lambda: [self.one(param) for param in self.model.parameters()])

    def model_grads(self):
        """Seconds of reading them by one call; None where there is none."""
        if self.whole is None:
            return None
        return self._timed(lambda: list(self.whole(self.model).values()))

    def gather(self):
        """Seconds of gathering as many bytes by torch.distributed; None where it is not started."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            return None
        part = torch.zeros(self.numel // self.ranks)

        def gather():
            dist.all_gather_into_tensor(torch.empty(len(part) * self.ranks), part)

        return self._timed(gather, check=False)

    def _timed(self, read, check=True):
        begin = time.perf_counter()
        read_out = read()
        seconds = time.perf_counter() - begin
        if check:
            # The mean over the ranks, each of which multiplied by another number.
            expected = (self.ranks + 1) / 2
            assert all((grad == expected).all() for grad in read_out)
        return seconds


def measure(name, setting, rounds):
    """One engine's seconds by what was timed, a round of new processes."""
    ranks = Ranks(setting["ranks"], setting["threads"], Reader, name, setting)
    try:
        for number in range(setting["reads"] + 1):
            for what in ("loop", "model_grads", "gather"):
                seconds = ranks.all(what)
                # The first read meets fresh memory everywhere.
                if number and None not in seconds:
                    rounds.setdefault(what, []).append(max(seconds))
    finally:
        ranks.end()


def run(names, setting, rounds):
    """What was measured of every engine that runs here."""
    results = {name: {} for name in names}
    for _ in range(rounds):
        for name in list(results):
            try:
                measure(name, setting, results[name])
            except Failed as failed:
                reason = str(failed).strip().splitlines()[-1]
                print(f"{name} is left out: {reason}", file=sys.stderr)
                del results[name]
    return {
        name: {what: statistics.median(seconds) for what, seconds in one.items()}
        for name, one in results.items()
    }


def rows(results, setting):
    """What was measured, one thing a row, as the bench of the command has it."""
    for name, one in results.items():
        loop = one["loop"]
        for what, seconds in one.items():
            yield {
                "name": f"gradients/{setting['tensors']}/{name.replace(' ', '-')}/{what}",
                "ranks": setting["ranks"],
                "median": seconds,
                "unit": "s",
                "reference": "loop",
                "ratio": seconds / loop,
            }


def table(results):
    """A table in Markdown."""
    lines = ["| engine | loop ms | model ms | loop over model | gloo all-gather ms |"]
    lines.append("|" + "---|" * 5)
    for name, one in results.items():
        loop, model, gather = (one.get(what) for what in ("loop", "model_grads", "gather"))
        cells = [f"{1e3 * loop:.0f}", *("" if s is None else f"{1e3 * s:.0f}" for s in [model])]
        cells.append("" if model is None else f"{loop / model:.1f}")
        cells.append("" if gather is None else f"{1e3 * gather:.0f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=1 << 27, help="elements of all tensors")
    parser.add_argument("--tensors", default="150,1500", help="how many tensors, by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--reads", type=int, default=3, help="reads of each kind a round")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, by commas")
    parser.add_argument("--json", metavar="FILE", help="adds a JSON object a line to a file")
    given = parser.parse_args()
    setting = {name: getattr(given, name) for name in ("numel", "ranks", "threads", "reads")}
    setting |= {"accumulation": 1, "dtype": "f32", "wire": None}
    for tensors in map(int, given.tensors.split(",")):
        setting["tensors"] = tensors
        results = run(given.engines.split(","), setting, given.rounds)
        load = os.getloadavg()[0]
        print(f"{given.numel} elements in {tensors} tensors, f32; load {load:.1f}\n")
        print(table(results) + "\n", flush=True)
        if given.json:
            with open(given.json, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows(results, setting))


if __name__ == "__main__":
    main()
