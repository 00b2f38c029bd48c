"""Makes llama_{tied,untied}.safetensors: what `transformers` computes for a tiny Llama.

Run with torch, transformers and safetensors installed: `python make_llama.py`. Each file holds
`weight.NAME` and `grad.NAME` for every parameter, `tokens`, `targets`, `logits` and `loss`.
"""

import pathlib

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SEQUENCES, POSITIONS, VOCABULARY = 2, 9, 31


def make(tied: bool) -> None:
    torch.manual_seed(5 + tied)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=tied,
        attention_bias=False,
        mlp_bias=False,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Larger than an initialisation, so that attention and norms matter to the result.
            weight.normal_(0.0, 0.3)
            if "norm" in name:
                weight.add_(1.0)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS))
    targets = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    tensors = {"tokens": tokens, "targets": targets, "logits": logits, "loss": loss.reshape(1)}
    for name, weight in model.named_parameters():
        tensors[f"weight.{name}"] = weight
        tensors[f"grad.{name}"] = weight.grad
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    name = "llama_tied" if tied else "llama_untied"
    path = pathlib.Path(__file__).with_name(f"{name}.safetensors")
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    save_file(tensors, path, metadata=made_with)
    print(f"{path.name}: {len(tensors)} tensors, loss {loss.item()}")


for tied in (False, True):
    make(tied)
