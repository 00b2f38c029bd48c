"""AdamW on one thread: oxizero's beside DeepSpeed's CPU Adam and torch's fused AdamW.

    python bench/optimizer.py                                     # 134 M elements
    python bench/optimizer.py --numel 300000 --rounds 1

Masters, gradients and both moments are f32, in one tensor. oxizero writes bf16 model weights in the
same pass, the others write none; `oxizero bf16` takes gradients in bf16, which DeepSpeed reads as
f32 where the parameters are. Beside them: plain copies of the bytes that oxizero's update moves.
"""

import argparse
import statistics
import time

import command
import rounds
from ranks import Ranks

PEER = "deepspeed"
UPDATE, COPIES = "update", "copies"


class Adam:
    """One process that updates one tensor by an optimizer of PyTorch's."""

    def __init__(self, rank, kind, numel):
        import torch

        torch.set_num_threads(1)
        import engines

        self.param = torch.nn.Parameter(torch.full((numel,), 1.0))
        self.param.grad = torch.full((numel,), 0.5)
        options = {"lr": 1e-3, "weight_decay": 0.1}
        if kind == PEER:
            engines.load(kind)
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            self.optimizer = DeepSpeedCPUAdam([self.param], adamw_mode=True, **options)
        else:
            self.optimizer = torch.optim.AdamW([self.param], fused=True, **options)
        # The first step makes the moments.
        self.optimizer.step()

    def step(self):
        """Seconds of an update."""
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin


def of_peer(kind, numel, steps):
    """One round of an optimizer of PyTorch's, in a process of its own."""
    process = Ranks(1, 1, Adam, kind, numel)
    try:
        seconds = statistics.median(process.all("step")[0] for _ in range(steps))
    finally:
        process.end()
    return {UPDATE: 1e9 * seconds / numel}


def of_oxizero(grads, numel, steps):
    """One round of oxizero, and of copies of as many bytes."""
    options = ("--rule", "adamw", "--grads", grads, "--params", numel)
    told = command.bench("optimizer", *options, rounds=steps)
    update = told[f"adamw/{grads}/{numel}"]
    return {UPDATE: update["median"], COPIES: told[update["reference"]]["median"]}


def rows(results, numel):
    """What was measured, one thing a row, as the bench of the command has it."""
    peer = results.get(PEER, {}).get(UPDATE)
    for name, one in results.items():
        yield {
            "name": f"optimizer/{name.replace(' ', '-')}/{numel}",
            "ranks": 1,
            "median": one[UPDATE],
            "unit": "ns/param",
            "reference": PEER if peer else None,
            "ratio": one[UPDATE] / peer if peer else None,
        }


def lines(results):
    peer = results.get(PEER, {}).get(UPDATE)
    for name, one in results.items():
        others = [peer, one.get(COPIES)]
        over = ["" if other is None else f"{one[UPDATE] / other:.2f}" for other in others]
        yield [name, f"{one[UPDATE]:.3f}", *over]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=1 << 27, help="elements of the tensor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="updates a round")
    parser.add_argument("--json", metavar="FILE", help="adds a JSON object a line to a file")
    given = parser.parse_args()
    engines = {
        PEER: lambda: of_peer(PEER, given.numel, given.steps),
        "torch fused": lambda: of_peer("torch", given.numel, given.steps),
        **{
            f"oxizero {grads}": lambda grads=grads: of_oxizero(grads, given.numel, given.steps)
            for grads in ("f32", "bf16")
        },
    }
    results = rounds.interleave(engines, given.rounds)
    title = f"AdamW of {given.numel} elements, one thread, {given.rounds} rounds"
    head = ["engine", "ns a parameter", "over deepspeed", "over copies"]
    rounds.tell(title, head, lines(results), rows(results, given.numel), given.json)


if __name__ == "__main__":
    main()
