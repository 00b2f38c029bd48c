"""Makes {llama,gpt2}_{tied,untied}.{safetensors,json}: what `transformers` computes for a tiny one.

Run with torch, transformers and safetensors installed: `python make_golden.py`. Each safetensors
file holds `weight.NAME` and `grad.NAME` for every parameter, `tokens`, `targets`, `logits` and
`loss`; the JSON file is the model's `config.json`.
"""

import pathlib

import torch
import transformers
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SEQUENCES, POSITIONS, VOCABULARY = 2, 9, 31


def llama(tied: bool) -> LlamaForCausalLM:
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
    return LlamaForCausalLM(config)


def gpt2(tied: bool) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_inner=None if tied else 24,
        n_layer=2,
        n_head=4,
        n_positions=16,
        layer_norm_epsilon=1e-5,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def make(family: str, tied: bool) -> None:
    torch.manual_seed(5 + tied)
    model = {"llama": llama, "gpt2": gpt2}[family](tied).float().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Larger than an initialisation, so that attention and norms matter to the result.
            weight.normal_(0.0, 0.3)
            if "norm" in name or ".ln_" in name and name.endswith("weight"):
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
    name = f"{family}_{'tied' if tied else 'untied'}"
    path = pathlib.Path(__file__).with_name(f"{name}.safetensors")
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    save_file(tensors, path, metadata=made_with)
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(path.with_suffix(".json"))
    print(f"{path.name}: {len(tensors)} tensors, loss {loss.item()}")


for family in ("llama", "gpt2"):
    for tied in (False, True):
        make(family, tied)
