"""Time and memory of a training step: oxizero beside torch's DDP and FSDP2 and DeepSpeed.

    python bench/train.py                       # 32 matrices of 2048 x 2048 in bf16
    python bench/train.py --model gpt           # a GPT in f32, 2048 tokens a micro-batch
    python bench/train.py --layers 2 --width 64 --rounds 1 --engines compute,ddp,"oxizero 2"

Every engine runs in processes of its own, two ranks of one thread each, in rounds one after the
other, so that what else the machine does meets all of them. Needs nothing but torch and oxizero;
engines that are not installed are left out by name. bench/set-up.sh installs all.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field

from ranks import Failed, Ranks

ENGINES = [
    "compute",
    "single",
    "ddp",
    "ddp-f32",
    *(f"deepspeed {stage}" for stage in (1, 2, 3)),
    "fsdp2",
    *(f"oxizero {stage}" for stage in range(4)),
    *(f"oxizero {stage} torch" for stage in range(4)),
]
ALONE = ("compute", "single")
REFERENCE = "ddp"
DEFAULTS = {
    "mlp": {"layers": 32, "width": 2048, "tokens": 4, "accumulation": 4, "dtype": "bf16"},
    "gpt": {"layers": 6, "width": 384, "tokens": 2048, "accumulation": 1, "dtype": "f32"},
}


class Trainer:
    """One rank of one engine; runs in a process of its own."""

    def __init__(self, rank, name, setting):
        import torch

        torch.set_num_threads(setting["threads"])
        import engines
        import memory
        import models

        engines.load(name)
        self.memory, self.models, self.setting = memory, models, setting
        # torch imports more of itself with the first optimizer, which is nobody's memory.
        torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
        self.draw = torch.Generator().manual_seed(1 + rank)
        self.dtype = engines.dtype(setting)
        self.base = memory.resident()
        with memory.watched() as most:
            self.engine = engines.make(name, models.build(setting), setting)
            for _ in range(setting["warm"]):
                self.step()
        self.start_peak = most() - self.base

    def step(self):
        """Trains one step; seconds of all of it and of its micro-batches, the processor's seconds,
        and the last loss."""
        count = self.setting["accumulation"]
        batches = [self.models.batch(self.setting, self.draw) for _ in range(count)]
        if batches[0].is_floating_point():
            batches = [batch.to(self.dtype) for batch in batches]
        begin, cpu = time.perf_counter(), time.process_time()
        for index, batch in enumerate(batches):
            loss = self.engine.micro_batch(batch, last=index + 1 == count)
        middle = time.perf_counter()
        self.engine.step()
        end = time.perf_counter()
        return end - begin, middle - begin, time.process_time() - cpu, loss.item()

    def peaks(self):
        """Bytes above what the process had before it had a model, at most: until it was warm, in
        one more step, and as the engine counts itself; None for engines that do not."""
        with self.memory.watched() as most:
            self.step()
        counted = self.engine.plan() if hasattr(self.engine, "plan") else None
        return self.start_peak, most() - self.base, counted


@dataclass
class Measured:
    """What the rounds of one engine gave."""

    ranks: int
    steps: list = field(default_factory=list)
    micro_batches: list = field(default_factory=list)
    cpu: list = field(default_factory=list)
    loss: float = 0.0
    start_peak: int = 0
    peak: int = 0
    plan: int | None = None

    @property
    def median(self):
        return statistics.median(self.steps)


def measure(name, setting, measured):
    """One round of an engine: some steps in new processes."""
    ranks = Ranks(measured.ranks, setting["threads"], Trainer, name, setting)
    try:
        for _ in range(setting["steps"]):
            # A step takes as long as its slowest rank.
            step, micro_batches, cpu, losses = zip(*ranks.all("step"), strict=True)
            measured.steps.append(max(step))
            measured.micro_batches.append(max(micro_batches))
            measured.cpu.append(max(cpu))
        measured.loss = statistics.fmean(losses)
        start, step, plans = zip(*ranks.all("peaks"), strict=True)
        measured.start_peak = max(measured.start_peak, *start)
        measured.peak = max(measured.peak, *step)
        measured.plan = plans[0]
    finally:
        ranks.end()


def run(names, setting, rounds):
    """What was measured of every engine that runs here, by name."""
    results = {name: Measured(1 if name in ALONE else setting["ranks"]) for name in names}
    for number in range(rounds):
        for name in list(results):
            try:
                measure(name, setting | {"ranks": results[name].ranks}, results[name])
            except Failed as failed:
                reason = str(failed).strip().splitlines()[-1]
                print(f"{name} is left out: {reason}", file=sys.stderr)
                del results[name]
                continue
            told = f"round {number + 1}: {name}: {results[name].steps[-1]:.3f} s"
            print(told, file=sys.stderr, flush=True)
    return results


def rows(results, model):
    """What was measured, one thing a row, as the bench of the command has it."""
    reference = results.get(REFERENCE)
    for name, one in results.items():
        for what, value, unit, other, of in [
            ("step", one.median, "s", reference and reference.median, REFERENCE),
            ("peak", max(one.peak, one.start_peak), "bytes", one.plan, "plan"),
        ]:
            yield {
                "name": f"train/{model}/{name.replace(' ', '-')}/{what}",
                "ranks": one.ranks,
                "median": value,
                "unit": unit,
                "reference": of if other else None,
                "ratio": value / other if other else None,
            }


HEAD = ["engine", "step s", "micro-batches s", "cpu s", "over ddp", "over compute", "start MiB",
        "peak MiB", "plan MiB", "peak over plan", "loss"]  # fmt: skip


def table(results):
    """A table in Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for name, one in results.items():
        cells = [
            name,
            f"{one.median:.3f}",
            f"{statistics.median(one.micro_batches):.3f}",
            f"{statistics.median(one.cpu):.3f}",
            *(_over(one, results.get(other)) for other in (REFERENCE, ALONE[0])),
            *(f"{size / 2**20:.0f}" for size in (one.start_peak, one.peak)),
            "" if one.plan is None else f"{one.plan / 2**20:.0f}",
            "" if one.plan is None else f"{max(one.start_peak, one.peak) / one.plan:.2f}",
            f"{one.loss:.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _over(one, other):
    return "" if other is None else f"{one.median / other.median:.2f}"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=DEFAULTS, default="mlp")
    for name in ("layers", "width", "tokens", "accumulation"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=("bf16", "f32"))
    parser.add_argument("--wire", choices=("bf16", "fp32"), help="communication_data_type")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps a round")
    parser.add_argument("--warm", type=int, default=2, help="steps before them")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, by commas")
    parser.add_argument("--json", metavar="FILE", help="adds a JSON object a line to a file")
    return parser.parse_args()


def main():
    given = arguments()
    setting = {name: getattr(given, name) for name in ("threads", "ranks", "warm", "steps", "wire")}
    for name, default in DEFAULTS[given.model].items():
        asked = getattr(given, name)
        setting[name] = default if asked is None else asked
    setting["model"] = given.model
    results = run(given.engines.split(","), setting, given.rounds)
    described = ", ".join(f"{name} {value}" for name, value in setting.items() if value)
    load = os.getloadavg()[0]
    print(f"{described}; rounds {given.rounds}; load {load:.1f} on {os.cpu_count()} processors\n")
    print(table(results))
    if given.json:
        with open(given.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows(results, given.model))


if __name__ == "__main__":
    main()
