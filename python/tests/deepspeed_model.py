"""The model of the checkpoints in `deepspeed_checkpoints`, and its data."""

import torch
from torch.nn import functional


class Net(torch.nn.Module):
    """A head that is tied, a layer that is frozen, a buffer, and sizes that nothing divides."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.up = torch.nn.Linear(5, 9)
        self.down = torch.nn.Linear(9, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.tensor([0.25]))

    def forward(self, tokens):
        x = self.frozen(self.embed(tokens))
        x = x + self.down(functional.gelu(self.up(x)))
        logits = self.head(x) + self.shift.to(x.dtype)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 7, (2, 4), generator=generator)


def adamw(model, groups):
    """AdamW of one group, or of matrices and vectors."""
    trained = [param for param in model.parameters() if param.requires_grad]
    if groups == 2:
        matrices = [param for param in trained if param.dim() > 1]
        vectors = [param for param in trained if param.dim() <= 1]
        trained = [
            {"params": matrices, "weight_decay": 0.125},
            {"params": vectors, "weight_decay": 0.0, "lr": 0.03125},
        ]
    return torch.optim.AdamW(trained, lr=0.015625, betas=(0.75, 0.9375))


# By folder: stage, dtype, optimizer groups, ranks.
CASES = {
    "stage1": (1, "fp32", 1, 2),
    "stage2": (2, "bf16", 2, 3),
    "stage3": (3, "bf16", 1, 3),
}
STEPS, MORE_STEPS = 3, 4
