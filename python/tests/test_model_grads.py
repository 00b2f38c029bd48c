"""The gradients of a whole model: one collective for each process group and dtype."""

import pytest
import torch
from test_access import start

from oxizero import utils
from oxizero.torch_backend import Group

COUNT = 1000


class Many(torch.nn.Module):
    """Many small parameters, of two dtypes by turns, with gradients by index and rank."""

    def __init__(self, dtypes):
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.zeros(1 + index % 7, dtype=dtypes[index % len(dtypes)])
            for index in range(COUNT)
        )

    def forward(self, rank):
        sums = [weight.float().sum() * grad(index, rank) for index, weight in self.named()]
        return torch.stack(sums).sum()

    def named(self):
        return enumerate(self.weights)


def grad(index, rank):
    return float(index % 64 + 4 * rank)


def counted(rank, size, back_end, stage, dtypes):
    engine = start(
        Many(dtypes),
        stage,
        oxizero={"backend": back_end},
        communication_data_type="bf16",
        data_types={"grad_accum_dtype": "bf16"},
        zero_optimization={"stage": stage, "reduce_bucket_size": 100},
    )
    engine.backward(engine(rank))
    utils.safe_get_full_model_grads(engine)  # the first call reduces them
    library, gathers = Group.all_gather, []
    Group.all_gather = lambda *args: (gathers.append(args), library(*args))
    before, _ = engine._core.collectives
    grads = utils.safe_get_full_model_grads(engine)
    after, _ = engine._core.collectives
    Group.all_gather = library
    dtypes_found = {grad.dtype for grad in grads.values()}
    assert len(grads) == COUNT and len(dtypes_found) == len(dtypes)
    assert after - before == (0 if stage == 0 else len(dtypes))
    if back_end == "torch":
        assert len(gathers) == after - before
    for index, weight in engine.module.named():
        expected = grad(index, (size - 1) / 2)
        assert grads[f"weights.{index}"].tolist() == [expected] * weight.numel()


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.float32, torch.bfloat16]], ids=len)
@pytest.mark.parametrize("back_end", ["native", "torch"])
def test_a_thousand_parameters_are_one_collective_a_group_and_dtype(ranks, back_end, dtypes):
    for stage in (0, 2):
        ranks(3, counted, 3, back_end, stage, dtypes)
