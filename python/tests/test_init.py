"""Models that are sharded while they are built."""

import pytest
import torch
from models import Conv, Gpt, batches, build
from test_access import start
from test_stage3 import sizes
from torch.nn.utils import parametrizations

import oxizero
from oxizero import pieces, utils, zero
from oxizero.torch_backend import Device


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


def same_on_torch(rank, kind, stage, monkeypatch):
    """No elements pass through the host's memory, were it another than the device's."""

    def refuse(*_):
        raise AssertionError("a copy to or from the host")

    for copies in ("read", "write"):
        monkeypatch.setattr(Device, copies, refuse)
    monkeypatch.setenv("OXIZERO_BACKEND", "torch")
    same(rank, kind, stage, half=True)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [Gpt, Conv])
def test_a_model_on_any_device_is_built_in_pieces_by_torch(ranks, kind, stage, monkeypatch):
    ranks(2, same_on_torch, kind, stage, monkeypatch)


def configured(rank):
    config = {"oxizero": {"backend": "torch"}}
    with zero.Init(config=config):
        model = Deep()
    assert sizes(model) == {0} and torch.distributed.is_initialized()
    engine = start(model, 3, **config)
    with zero.GatheredParameters(model, modifier_rank=1):
        assert all(layer.weight.eq(0.25).all() for layer in model.layers)
        with torch.no_grad():
            model.own.fill_(5.0 + rank)
    assert engine.state_dict()["own"].tolist() == [6.0] * 3


def test_the_configuration_says_by_whom_pieces_are_gathered(ranks):
    ranks(2, configured)


def test_a_model_without_values_is_not_sharded():
    with pytest.raises(oxizero.ConfigError, match="on the meta device is refused"):
        with torch.device("meta"), zero.Init():
            torch.nn.Linear(2, 2)


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
    with zero.Init(config={"bfloat16": {"enabled": True}, "train_batch_size": 3}):
        model = torch.nn.Linear(4, 4)
    assert model.weight.dtype == torch.bfloat16
    for enabled in ("auto", "yes"):
        with pytest.raises(oxizero.ConfigError, match="bf16.enabled"):
            zero.Init(config={"bf16": {"enabled": enabled}})
    with pytest.raises(oxizero.ConfigError, match="true_batch_size"):
        zero.Init(config={"true_batch_size": 1})
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


class Assigned(torch.nn.Module):
    """It assigns its layer's data, as models do that initialize it themselves."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.square = torch.nn.Linear(2, 2, bias=False)
        self.narrow = torch.nn.Linear(2, 2, bias=False).bfloat16()
        self.layer.weight.data = torch.arange(6.0).view(3, 2) + 10 * oxizero.world.place().rank
        self.layer.bias.data = self.layer.bias.data * 0 + 3
        self.square.weight.data.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.square.weight.data = self.square.weight.data.t()
        self.narrow.weight.data = torch.ones(1, 2, dtype=torch.bfloat16)


def assigned(rank, stage):
    with zero.Init():
        model = Assigned()
        late = torch.nn.Linear(2, 2, bias=False)
    if rank == 0:
        late.weight.data = torch.full((2, 2), 7.0)
    model.late = late
    with zero.Init():
        model.wide = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)
    model.wide.weight.data = torch.full((2, 2), 9.0, dtype=torch.float64)
    engine = start(model, stage)
    state = engine.state_dict()
    assert state["layer.weight"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert state["layer.bias"].tolist() == [3.0] * 3
    assert state["square.weight"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert state["narrow.weight"].tolist() == [[1.0, 1.0]]
    assert state["late.weight"].tolist() == [[7.0, 7.0]] * 2
    assert state["wide.weight"].equal(torch.full((2, 2), 9.0, dtype=torch.float64))
    assert utils.safe_get_full_fp32_param(model.late.weight).tolist() == [[7.0, 7.0]] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_that_is_assigned_is_the_parameter(ranks, stage):
    ranks(2, assigned, stage)


def assigned_by_others(rank):
    with zero.Init():
        model = torch.nn.Linear(2, 2)
    with zero.GatheredParameters(model):
        expected = model.weight.tolist()
    model.bias.data = torch.full((2,), float(rank))
    if rank == 1:
        model.weight.data = torch.zeros(2, 2)
    with zero.GatheredParameters(model.bias, modifier_rank=1):
        assert model.bias.tolist() == [rank] * 2
    engine = start(model, 3)
    state = engine.state_dict()
    assert state["weight"].tolist() == expected
    assert state["bias"].tolist() == [1.0, 1.0]


def test_only_rank_0s_data_count_but_for_a_modifiers(ranks):
    ranks(2, assigned_by_others)


def assigned_wrongly(rank):
    def model():
        with zero.Init():
            return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    unlike = model()
    unlike[1].weight.data = torch.zeros(2, 2 + rank)
    with pytest.raises(oxizero.ConfigError, match=r"`1.weight` was .* not of one shape"):
        start(unlike, 3)
    another = model()
    another[1].weight.data = another[0].weight.data
    with pytest.raises(oxizero.ConfigError, match=r"`1.weight` was assigned the data of another"):
        start(another, 3)
    shared = model()
    with zero.Init():
        shared.last = torch.nn.Module()
        shared.last.weight = torch.nn.Parameter(shared[0].weight)
        zero.Init(shared.last)
    with pytest.raises(oxizero.ConfigError, match="`0.weight` and `last.weight` were made to"):
        start(shared, 3)
    longer = model()
    longer[0].bias.data = torch.zeros(3)
    with pytest.raises(oxizero.ConfigError, match=r"shape \(2,\) .* assigned data of shape \(3,\)"):
        with zero.GatheredParameters(longer, modifier_rank=0):
            pass


def test_data_that_is_assigned_otherwise_is_refused_by_name(ranks):
    ranks(2, assigned_wrongly)


def as_array(rank):
    with zero.Init():
        layer = torch.nn.Linear(2, 3)
        array = layer.weight.data.clone().numpy()
        array[:] = 5.0
        layer.weight.data.copy_(torch.from_numpy(array))
        with pytest.raises(oxizero.ConfigError, match=r"shape \(3,\).*clone\(\).numpy\(\)"):
            layer.bias.data.numpy()
    with zero.GatheredParameters(layer.weight):
        assert layer.weight.eq(5.0).all()


def test_an_array_of_a_piece_is_refused_with_what_to_write(ranks):
    ranks(2, as_array)


class Normed(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layer = norm(torch.nn.Linear(4, 4))

    def forward(self, x):
        return self.layer(x)


def normed(rank, stage, norm):
    def states(model):
        engine = start(model, stage)
        for _ in range(2):
            engine.backward(engine(torch.full((2, 4), rank + 1.0)).pow(2).mean())
            engine.step()
        state = engine.state_dict()
        engine.destroy()
        return state

    torch.manual_seed(3)
    expected = states(Normed(norm))
    torch.manual_seed(3 + rank)
    with zero.Init():
        model = Normed(norm)
    assert sizes(model) == {0}
    found = states(model)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(value) for name, value in expected.items())


def again(layer):
    """The layer with a new parameter of the old one's data, whose memory is another's."""
    layer.weight = torch.nn.Parameter(layer.weight.data)
    layer.bias = torch.nn.Parameter(layer.bias.detach()[:])
    return layer


NORMS = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    torch.nn.utils.weight_norm,
    torch.nn.utils.spectral_norm,
    again,
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_parameters_that_are_made_of_those_in_pieces_train_the_same(ranks, stage, norm):
    ranks(2, normed, stage, norm)


def gone(_):
    def model():
        with zero.Init():
            return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    late = model()
    late[1].weight = torch.nn.Parameter(late[1].weight.data)
    with pytest.raises(oxizero.ConfigError, match="parameter `1.weight` was made of the data of"):
        start(late, 3)
    shown = model()
    shown[0].register_buffer("shown", shown[0].weight.data)
    with pytest.raises(oxizero.ConfigError, match=r"buffer `0.shown` was made .*clone\(\) of it"):
        start(shown, 3)


def test_what_is_made_of_data_that_is_gone_is_refused_by_name(ranks):
    ranks(1, gone)
