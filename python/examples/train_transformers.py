"""Trains a small Llama of the transformers library, from random weights, on that library's source.

    oxizero launch -n 2 train_transformers.py
    torchrun --nproc-per-node 2 train_transformers.py --steps 50

Each rank holds a part of the weights, gradients and optimizer states: the configuration beside this
file asks for ZeRO stage 3.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import oxizero

CONTEXT = 128


def small_llama():
    """Of bytes: 1.4 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def batches(text, size, rank):
    """Random pieces of the text without end, others on each rank."""
    draw = torch.Generator().manual_seed(rank)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (size,), generator=draw)
        yield torch.stack([text[start : start + CONTEXT] for start in starts])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--config", default=Path(__file__).parent / "ds_config_zero3.json")
    arguments = parser.parse_args()

    engine, _, _, _ = oxizero.initialize(model=small_llama(), config=arguments.config)
    text = torch.tensor(list(Path(modeling_llama.__file__).read_bytes()))
    data = batches(text, engine.train_micro_batch_size_per_gpu(), engine.global_rank)
    for step in range(1, arguments.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = next(data)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0 and (step == 1 or step % 10 == 0):
            norm = engine.get_global_grad_norm()
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    main()
