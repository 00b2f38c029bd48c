"""Stage 3: what the hooks of modules keep, and what they know of passes to come."""

import gc

import pytest
import torch
from test_access import start
from torch.utils.checkpoint import checkpoint


class Layers(torch.nn.Module):
    """Six layers; if so asked, each half is run again in backward."""

    def __init__(self, is_checkpointed):
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(6))

    def forward(self, x):
        for half in (self.layers[:3], self.layers[3:]):
            run = torch.nn.Sequential(*half)
            x = checkpoint(run, x, use_reentrant=False) if self.is_checkpointed else run(x)
        return x


def activations():
    """The memory of activations that live now, each once."""
    found = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    return len({item.untyped_storage()._cdata for item in found if item.shape == (5, 7)})


def kept(stage, is_checkpointed):
    """The activations after each forward, each step, and once the loss is gone."""
    engine = start(Layers(is_checkpointed), stage)
    counts = []
    for _ in range(2):
        x = torch.ones(5, 7, requires_grad=True)
        loss = engine(x).sum()
        counts.append(activations())
        engine.backward(loss)
        engine.step()
        counts.append(activations())
        del loss, x
        counts.append(activations())
    engine.destroy()
    return counts


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_no_activation_lives_longer_than_with_whole_weights(is_checkpointed):
    gc.collect()
    gc.disable()  # nothing waits for the collector of cycles
    try:
        assert kept(3, is_checkpointed) == kept(2, is_checkpointed)
    finally:
        gc.enable()
