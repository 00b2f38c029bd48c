"""Trains a small transformer on its own text: torchrun --nproc-per-node 2 train_gpt.py"""

from pathlib import Path

import torch
from torch.nn import functional

import oxizero

HERE = Path(__file__).parent
CONTEXT, WIDTH, STEPS = 64, 64, 50


class Gpt(torch.nn.Module):
    """Bytes in, the loss of predicting the next ones out."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.position = torch.nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH,
            nhead=4,
            dim_feedforward=4 * WIDTH,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.blocks = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1]) + self.position
        mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT, dtype=x.dtype)
        logits = self.head(self.blocks(x, mask=mask, is_causal=True)).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def main():
    torch.set_num_threads(1)
    engine, _, _, _ = oxizero.initialize(model=Gpt(), config=HERE / "ds_config.json")
    text = torch.tensor(list(Path(__file__).read_bytes()))
    draw = torch.Generator().manual_seed(engine.global_rank)
    for step in range(STEPS):
        for _ in range(engine.gradient_accumulation_steps()):
            starts = torch.randint(len(text) - CONTEXT, (4,), generator=draw)
            loss = engine(torch.stack([text[start : start + CONTEXT + 1] for start in starts]))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if engine.global_rank == 0:
        print(f"done: loss {loss.item():.3f}, gradient norm {engine.get_global_grad_norm():.3f}")


if __name__ == "__main__":
    main()
