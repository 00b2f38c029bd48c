"""Small models, their data, and the plain torch loop that the engine must equal."""

import torch
from torch.nn import functional


class Gpt(torch.nn.Module):
    """One block, and a head that is tied to the embedding."""

    def __init__(self, vocab=24, width=16, context=8):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, width)
        self.position = torch.nn.Parameter(torch.zeros(context, width))
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.Linear(width, 3 * width, bias=False)
        self.project = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.head = torch.nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1]) + self.position
        heads = self.attention(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        x = x + self.down(functional.gelu(self.up(x)))
        logits = self.head(x).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @staticmethod
    def batch(generator):
        return torch.randint(0, 24, (2, 9), generator=generator)


class Conv(torch.nn.Module):
    """Two convolutions, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.GroupNorm(2, 4)
        self.second = torch.nn.Conv2d(4, 5, 3, stride=2)
        self.head = torch.nn.Linear(5, 3)
        self.register_buffer("shift", torch.tensor([0.1333521432]))

    def forward(self, images):
        x = functional.gelu(self.norm(self.first(images.to(self.first.weight.dtype))))
        x = functional.gelu(self.second(x)).mean((2, 3))
        return (self.head(x).float() - self.shift).square().mean()

    @staticmethod
    def batch(generator):
        return torch.randn(2, 3, 7, 7, generator=generator)


def build(kind):
    torch.manual_seed(1)
    return kind()


def decay_groups(model):
    """Matrices decay; vectors do not, and learn faster."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": 1e-2},
        {"params": vectors, "weight_decay": 0.0, "lr": 2e-2},
    ]


def adamw(groups):
    # An eps above the noise of sums: without it, elements without gradient move by noise.
    return torch.optim.AdamW(groups, eps=1e-3, betas=(0.8, 0.95))


def batches(kind, rank, steps, accumulation):
    """A rank's micro-batches, by step."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [[kind.batch(generator) for _ in range(accumulation)] for _ in range(steps)]


def train_plain(kind, size, dtype, accumulation, clip, steps):
    """The loop without an engine: f32 masters beside a model in `dtype`, one process. Losses by
    rank, the norms of the steps' gradients, and the master weights by name."""
    model = build(kind)
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    shells = {name: torch.nn.Parameter(master) for name, master in masters.items()}
    by_param = {id(param): name for name, param in model.named_parameters()}
    groups = decay_groups(model)
    for group in groups:
        group["params"] = [shells[by_param[id(param)]] for param in group["params"]]
    optimizer = adamw(groups)
    for param in model.parameters():
        param.data = param.data.to(dtype)
    data = [batches(kind, rank, steps, accumulation) for rank in range(size)]
    losses, norms = [[] for _ in range(size)], []
    for step in range(steps):
        for shell in shells.values():
            shell.grad = torch.zeros_like(shell)
        for rank in range(size):
            for batch in data[rank][step]:
                loss = model(batch)
                loss.backward()
                losses[rank].append(loss.item())
                for name, param in model.named_parameters():
                    shells[name].grad += param.grad.float()
                    param.grad = None
        for shell in shells.values():
            shell.grad /= size * accumulation
        norm = torch.nn.utils.clip_grad_norm_(shells.values(), clip or float("inf"))
        norms.append(norm.item())
        optimizer.step()
        for name, param in model.named_parameters():
            param.data.copy_(shells[name].data)
    return losses, norms, {name: shell.detach() for name, shell in shells.items()}
