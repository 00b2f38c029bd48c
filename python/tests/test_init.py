"""Models that are sharded while they are built."""

import pytest
import torch
from models import Conv, Gpt, batches, build
from test_access import start
from test_stage3 import sizes

import oxizero
from oxizero import pieces, utils, zero


def trained(engine, kind, rank):
    for (batch,) in batches(kind, rank, 3, 1):
        engine.backward(engine(batch))
        engine.step()
    return {
        name: utils.safe_get_full_fp32_param(param)
        for name, param in engine.module.named_parameters()
    }


def same(rank, kind, stage, half):
    config = {"bf16": {"enabled": half}}
    engine = start(build(kind), stage, **config)
    expected = trained(engine, kind, rank)
    engine.destroy()
    torch.manual_seed(1)
    with zero.Init(config_dict_or_path=None):
        model = kind()
    assert sizes(model) == {0}
    with pytest.raises(RuntimeError, match="made inside of oxizero.zero.Init"):
        model.head.weight.sum()
    if rank > 0:
        # Rank 0's weights are to win, and have.
        torch.manual_seed(7)
    engine = start(model, stage, **config)
    masters = trained(engine, kind, rank)
    assert all(masters[name].equal(value) for name, value in expected.items())
    assert all(pieces.find(param) is None for param in model.parameters())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [Gpt, Conv])
def test_a_model_that_is_built_in_pieces_trains_the_same(ranks, kind, stage, half):
    ranks(2, same, kind, stage, half)


class Deep(torch.nn.Module):
    """It initializes the weights of its layers itself, and freezes one."""

    def __init__(self, live=None):
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for _ in range(8):
            self.layers.append(torch.nn.Linear(64, 64))
            if live is not None:
                live.append(sum(p.untyped_storage().nbytes() for p in self.parameters()))
        for layer in self.layers:
            torch.nn.init.constant_(layer.weight, 0.25)
            layer.bias.data.normal_()
            with torch.no_grad():
                layer.bias[0] = 1.0
        self.layers[0].requires_grad_(False)
        self.own = torch.nn.Parameter(torch.ones(3))


def built(rank):
    live = []
    torch.manual_seed(rank)
    with zero.Init(), zero.Init(enabled=False), zero.Init():
        model = Deep(live)
    assert set(live) == {0}
    assert torch.nn.Linear.__init__.__name__ == "__init__"
    assert not hasattr(torch.nn.Linear.__init__, "__wrapped__")
    with zero.GatheredParameters(model):
        assert all(layer.weight.eq(0.25).all() for layer in model.layers)
        assert all(layer.bias[0] == 1.0 for layer in model.layers)
        bias = model.layers[3].bias.detach().clone()
    with zero.GatheredParameters(model.own, modifier_rank=1), torch.no_grad():
        model.own.fill_(5.0 + rank)
    with pytest.raises(oxizero.EngineError, match="modifier_rank"):
        with zero.GatheredParameters(model.own), torch.no_grad():
            model.own.fill_(0.0)
    engine = start(model, 3)
    with zero.GatheredParameters(model):
        assert model.own.tolist() == [6.0] * 3
        assert model.layers[0].weight.eq(0.25).all()
        assert model.layers[3].bias.equal(bias)
    engine.destroy()
    return bias.tolist()


def test_what_writes_to_pieces_finds_them_whole(ranks):
    first, second = ranks(2, built)
    assert first == second


def halves(rank):
    with zero.Init(dtype=torch.bfloat16):
        model = torch.nn.Linear(4, 4)
    assert model.weight.dtype == torch.bfloat16
    with zero.Init(config_dict_or_path={"fp16": {"enabled": True}}):
        model = torch.nn.Linear(4, 4)
    assert model.weight.dtype == torch.float16
    whole = torch.nn.Linear(4, 4)
    expected = whole.weight.tolist()
    zero.Init(module=whole)
    with zero.GatheredParameters(whole):
        assert rank > 0 or whole.weight.tolist() == expected
    with pytest.raises(ZeroDivisionError), zero.Init():
        raise ZeroDivisionError
    assert torch.nn.Linear(2, 2).weight.untyped_storage().nbytes() == 16


def test_dtypes_and_models_that_are_there(ranks):
    ranks(2, halves)


def test_options_that_do_not_work_are_refused():
    for option in ("mpu", "data_parallel_group", "zero_quantized_weights", "param_swapper"):
        with pytest.raises(oxizero.ConfigError, match=option):
            zero.Init(**{option: True})
    with pytest.raises(oxizero.ConfigError, match="remote_device='nvme'"):
        zero.Init(remote_device="nvme")


def hugging(rank):
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )
    torch.manual_seed(rank)
    with zero.Init():
        model = transformers.LlamaForCausalLM(settings)
    assert sizes(model) == {0}
    engine = start(model, 3)
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(5):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] < 5


def test_a_model_of_transformers_is_built_in_pieces(ranks):
    pytest.importorskip("transformers")
    ranks(2, hugging)
