"""Models that are trained to be measured, and their batches."""

import torch
from torch.nn import functional


class Mlp(torch.nn.Module):
    """Square matrices, one after the other: nearly all of a step is the engine's."""

    def __init__(self, layers, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(layers)
        )
        for layer in self.layers:
            # So that activations keep their size: torch's own start decays to denormals over many
            # layers, which slow every optimizer ten times.
            torch.nn.init.normal_(layer.weight, std=width**-0.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


class Block(torch.nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.attend = torch.nn.Linear(width, 3 * width)
        self.project = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        of_heads = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        mixed = functional.scaled_dot_product_attention(
            *of_heads.transpose(1, 3).unbind(2), is_causal=True
        )
        x = x + self.project(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Gpt(torch.nn.Module):
    """Tokens in, the loss of predicting the next ones out."""

    def __init__(self, layers, width, context, vocab):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, width)
        self.position = torch.nn.Embedding(context, width)
        self.layers = torch.nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))[:, :-1].float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Products(torch.nn.Module):
    """Every element times one number: that number is every gradient."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = torch.nn.ParameterList(tensors)

    def forward(self, x):
        return sum((tensor * x).sum() for tensor in self.tensors)


class Joined(torch.nn.Module):
    """All tensors, one after the other, times one number, which is every gradient: one operation
    for as many tensors as there are."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = torch.nn.ParameterList(tensors)

    def forward(self, x):
        return (torch.cat(list(self.tensors)) * x).sum()


CONTEXT, VOCAB = 128, 512


def build(setting):
    """The model that a setting names, the same in every process."""
    torch.manual_seed(0)
    if setting["model"] == "mlp":
        return Mlp(setting["layers"], setting["width"])
    return Gpt(setting["layers"], setting["width"], CONTEXT, VOCAB)


def batch(setting, draw):
    """A micro-batch of `tokens` rows or tokens."""
    if setting["model"] == "mlp":
        return torch.randn(setting["tokens"], setting["width"], generator=draw)
    return torch.randint(VOCAB, (setting["tokens"] // CONTEXT, CONTEXT), generator=draw)
