"""The weights alone, in one file that torch and transformers read."""

import os
import pathlib

import pytest
import torch
from models import Conv, Gpt, build
from test_access import Constant, start
from test_stage3 import input_of, step

import oxizero

GATHERED = {"stage3_gather_16bit_weights_on_model_save": True}


def zero(stage):
    return {"zero_optimization": {"stage": stage} | (GATHERED if stage == 3 else {})}


def saves(rank, stage, folder, name, **config):
    engine = start(build(Gpt), stage, **zero(stage), **config)
    step(engine, Gpt.batch(torch.Generator().manual_seed(rank)))
    assert engine.save_16bit_model(folder, name) is True
    assert sorted(os.listdir(folder)) == [name]
    return {key: value.clone() for key, value in engine.state_dict().items()}


def read(path):
    if path.suffix == ".safetensors":
        model = Gpt()
        pytest.importorskip("safetensors.torch").load_model(model, path)
        return model.state_dict()
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_file_has_what_the_model_has(ranks, tmp_path, stage, name):
    states = ranks(2, saves, stage, tmp_path, name)
    found = read(tmp_path / name)
    for state in states:
        assert state.keys() == found.keys()
        assert all(found[key].equal(value) for key, value in state.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_in_the_models_dtype_and_tied_ones_are_written_once(ranks, tmp_path, stage):
    [state] = ranks(1, lambda rank: saves(rank, stage, tmp_path, "a.bin", bf16={"enabled": True}))
    found = read(tmp_path / "a.bin")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert all(found[key].equal(value) for key, value in state.items())
    head, embedding = found["head.weight"], found["embedding.weight"]
    assert head.data_ptr() == embedding.data_ptr()
    numel = sum(param.numel() for param in Gpt().parameters())
    assert 2 * numel < (tmp_path / "a.bin").stat().st_size < 2 * numel + 8000


def hugging(rank, kind, stage, folder, name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    if kind == "gpt2":
        settings = transformers.GPT2Config(
            vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
        model = transformers.GPT2LMHeadModel(settings)
    else:
        settings = transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        )
        model = transformers.LlamaForCausalLM(settings)
    engine = start(model, stage, **zero(stage), bf16={"enabled": True})
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    assert engine.save_16bit_model(folder, name)
    if rank == 0:
        settings.save_pretrained(folder)
    engine.eval()
    with torch.no_grad():
        return tokens, engine(input_ids=tokens).logits


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("kind", "name"), [("gpt2", "pytorch_model.bin"), ("llama", "model.safetensors"),
                       ("gpt2", "model.safetensors")]
)
def test_transformers_loads_the_file_and_gives_the_same_logits(ranks, tmp_path, kind, name, stage):
    transformers = pytest.importorskip("transformers")
    tokens, expected = ranks(2, hugging, kind, stage, tmp_path, name)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    with torch.no_grad():
        assert model(input_ids=tokens).logits.equal(expected)


def not_gathered(rank, folder):
    engine = start(build(Conv), 3)
    assert not engine.zero_gather_16bit_weights_on_model_save()
    assert engine.save_16bit_model(folder / "none") is False
    assert not (folder / "none").exists()
    step(engine, Conv.batch(torch.Generator().manual_seed(0)))


def test_sharded_weights_are_gathered_only_where_the_configuration_says_so(ranks, tmp_path):
    ranks(2, not_gathered, tmp_path)


class Adapted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(4, 4).requires_grad_(False)
        self.adapter = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.adapter(self.base(x)).square().mean()


def without_frozen(rank, stage, folder):
    torch.manual_seed(2)
    engine = start(Adapted(), stage, **zero(stage))
    step(engine, input_of(rank, 2, 4))
    engine.save_16bit_model(folder, exclude_frozen_parameters=True)
    engine.save_fp16_model(folder, "all.bin")


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_may_be_left_out(ranks, tmp_path, stage):
    ranks(2, without_frozen, stage, tmp_path)
    assert list(read(tmp_path / "pytorch_model.bin")) == ["adapter.weight", "adapter.bias"]
    assert len(read(tmp_path / "all.bin")) == 4


def cannot_write(rank, folder, name):
    engine = start(build(Conv), 3, **zero(3))
    (folder / name).write_text("before")
    whose = (OSError, oxizero.EngineError) if rank == 0 else oxizero.EngineError
    why = "File exists|Not a directory" if rank == 0 else "rank 0 did not write"
    with pytest.raises(whose, match=why):
        engine.save_16bit_model(folder / name, "model" + pathlib.Path(name).suffix)
    assert (folder / name).read_text() == "before"
    step(engine, Conv.batch(torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", ["in.the.way.bin", "in.the.way.safetensors"])
def test_what_rank_0_cannot_write_is_an_error_of_all_and_training_goes_on(ranks, tmp_path, name):
    ranks(2, cannot_write, tmp_path, name)


def in_parts(rank, folder):
    model = Constant()
    oxizero.mark_split(model.weight, 0, [0, 1])
    engine = start(model, 1)
    with pytest.raises(oxizero.EngineError, match="parts of `weight`.*oxizero convert"):
        engine.save_16bit_model(folder)


def test_parameters_in_parts_are_refused_by_name(ranks, tmp_path):
    ranks(2, in_parts, tmp_path)


class Said(torch.nn.Module):
    """Says more than tensors."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        self.version = state["version"]


def test_what_is_no_tensor_is_refused_in_safetensors_and_kept_in_torchs(tmp_path):
    engine = start(Said(), 1)
    with pytest.raises(oxizero.EngineError, match="_extra_state.*no tensor.*bin"):
        engine.save_16bit_model(tmp_path, "model.safetensors")
    assert os.listdir(tmp_path) == []
    engine.save_16bit_model(tmp_path)
    assert read(tmp_path / "pytorch_model.bin")["_extra_state"] == {"version": 2}
