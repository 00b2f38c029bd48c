"""Many claims about engines, made by ranks that are started once.

A claim is a function of a `Setting`. All ranks of a world make it, on each back end and in each
stage. Ranks cost far more than most claims do, so that all claims of a file share those of a world;
each is a test by itself all the same. Where one fails its rank ends, which the others are told; the
claims that are left are made by new ranks.
"""

import functools
import gc
import itertools
import traceback
from dataclasses import dataclass

import pytest
import torch
from conftest import run_ranks

import oxizero
from oxizero import utils

STAGES = (0, 1, 2, 3)
BACK_ENDS = ("native", "torch")
SGD = {"type": "SGD", "params": {"lr": 1.0}}
BF16 = {"enabled": True}


@dataclass(frozen=True)
class Setting:
    """Where a claim is made."""

    rank: int
    back_end: str
    stage: int

    def start(self, model, optimizer=None, bucket=None, **config):
        """An engine with plain SGD, if nothing else is said; a bucket has so many elements."""
        zero = {"stage": self.stage} | ({"reduce_bucket_size": bucket} if bucket else {})
        given = {"oxizero": {"backend": self.back_end}, "zero_optimization": zero}
        if optimizer is None:
            given["optimizer"] = SGD
        return oxizero.initialize(model=model, optimizer=optimizer, config=given | config)[0]


class Given(torch.nn.Module):
    """Parameters whose gradients are what a call gives by name, in that order."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, torch.nn.Parameter(torch.as_tensor(value).clone()))

    def forward(self, **gradients):
        """In f32, as losses are; autograd rounds gradients to the parameters' dtypes."""
        terms = [(getattr(self, name).float() * torch.as_tensor(gradient)).sum()
                 for name, gradient in gradients.items()]
        return sum(terms)


def backward(engine, **gradients):
    """A backward of a `Given`, without the step."""
    engine.backward(engine(**gradients))


def window(engine, *micro_batches):
    """A micro-batch with each of these gradients by name."""
    for gradients in micro_batches:
        backward(engine, **gradients)
        engine.step()


def grads(engine):
    """All gradients by name, as they are read alone and together."""
    together = utils.safe_get_full_model_grads(engine)
    for name, param in engine.module.named_parameters():
        alone = utils.safe_get_full_grad(param)
        assert (alone is None) == (name not in together)
        assert alone is None or alone.equal(together[name])
    return {name: grad.tolist() for name, grad in together.items()}


def masters(engine):
    """All master weights by name."""
    named = engine.module.named_parameters()
    whole = {name: utils.safe_get_full_fp32_param(param) for name, param in named}
    return {name: master.tolist() for name, master in whole.items() if master is not None}


class Claims:
    """The claims of a file."""

    def __init__(self):
        self._cases = []
        self._told = {}

    def __call__(self, ranks=2, stages=STAGES, back_ends=BACK_ENDS):
        """Makes a function a claim about worlds of so many ranks."""

        def register(claim):
            for back_end, stage in itertools.product(back_ends, stages):
                self._cases.append((ranks, claim, back_end, stage))
            return claim

        return register

    def cases(self):
        """What is to be checked, each by its name."""
        return [
            pytest.param(index, id=f"{claim.__name__}-{back_end}-stage{stage}")
            for index, (_, claim, back_end, stage) in enumerate(self._cases)
        ]

    def check(self, index):
        """Fails if a rank of the case did."""
        size = self._cases[index][0]
        if index not in self._told:
            of_size = [at for at, (ranks, *_) in enumerate(self._cases) if ranks == size]
            while of_size:
                left = [self._cases[at][1:] for at in of_size]
                by_rank = run_ranks(size, _make, left)
                together = list(zip(*by_rank, strict=False))
                failed = (at for at, told in enumerate(together) if any(told))
                ended = next(failed, len(together) - 1)
                self._told |= zip(of_size, together[: ended + 1], strict=False)
                of_size = of_size[ended + 1 :]
        wrong = [f"rank {rank}:\n{why}" for rank, why in enumerate(self._told[index]) if why]
        if wrong:
            pytest.fail("\n".join(wrong), pytrace=False)


def _make(rank, cases):
    """Makes claims until one fails; why each did, or None."""
    gc.freeze()
    told = []
    for claim, back_end, stage in cases:
        try:
            claim(Setting(rank, back_end, stage))
            told.append(None)
        except BaseException:
            told.append(traceback.format_exc())
            break
        # Engines are in cycles; with them go their connections.
        gc.collect()
    return told
