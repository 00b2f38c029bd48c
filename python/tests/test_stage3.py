"""Weights that rest sharded: what models may do, and what is whole when."""

import copy
import io
from dataclasses import dataclass

import pytest
import torch
import torch.utils.checkpoint
from models import Gpt, build
from test_access import Constant, start
from test_engine import Checkpointed
from torch.nn import functional

import oxizero
from oxizero import utils, zero


def sizes(model):
    """Bytes of memory that the parameters lie in."""
    return {param.untyped_storage().nbytes() for param in model.parameters()}


def step(engine, *args):
    engine.backward(engine(*args))
    engine.step()


def agree(rank, make, forward, stages=(2, 3), steps=3, **config):
    """Stage 3 gives the same weights as stage 2, whose weights are whole."""
    states = []
    for stage in stages:
        torch.manual_seed(5)
        engine = start(make(), stage, **config)
        for _ in range(steps):
            engine.backward(forward(engine, rank))
            engine.step()
        states.append(engine.state_dict())
        if stage == 3:
            assert sizes(engine.module) == {0}
        engine.destroy()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


def input_of(rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def mse(engine, rank, *shape):
    return engine(input_of(rank, *shape)).float().square().mean()


def freed(rank):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    engine = start(model, 3)
    assert sizes(model) == {0}
    live = []

    def count(*_):
        live.append(sum(layer.weight.untyped_storage().nbytes() > 0 for layer in model))

    for layer in model:
        layer.register_forward_pre_hook(count)
        layer.weight.register_post_accumulate_grad_hook(count)
    loss = mse(engine, rank, 2, 64)
    assert sizes(model) == {0} and live == [1] * 6
    engine.backward(loss)
    assert sizes(model) == {0} and live[6:-1] == [1] * 5
    assert live[-1] <= 1, "the first layer has no input with a gradient"
    assert all(param.grad is None for param in model.parameters())
    engine.step()
    assert dict(engine._core.memory)["gathered weights"] == 0


def test_weights_are_free_between_forward_and_backward(ranks):
    ranks(2, freed)


class Odd(torch.nn.Module):
    """Uses that are not one tensor in, one tensor out."""

    @dataclass(frozen=True)
    class Pair:
        left: torch.Tensor
        right: list

    class Inner(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(4))
            self.extra = torch.nn.ParameterList([torch.ones(4), torch.full((4,), 0.5)])

        def forward(self, x, *, shift, unused=None):
            return Odd.Pair(x * self.scale + shift, [x * self.extra[0], {"x": x + self.extra[1]}])

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.relu = torch.nn.ReLU(inplace=True)
        self.inner = Odd.Inner()
        self.shared = torch.nn.Linear(4, 4)
        self.tanh = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.unused = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.relu(self.first(x))
        x = self.shared(x) + self.shared(self.frozen(x))
        pair = self.inner(x, shift=x.sum(0))
        y = self.shared(x)
        y += self.norm(pair.left + pair.right[0] + pair.right[1]["x"])
        return self.tanh(y)


def odd(rank):
    agree(rank, Odd, lambda engine, rank: mse(engine, rank, 3, 4))
    assert start(Odd(), 3).eval()(input_of(rank, 3, 4)).shape == (3, 4)


def test_modules_of_many_kinds(ranks):
    ranks(2, odd)


def attention(rank):
    def layer():
        return torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    agree(rank, layer, lambda engine, rank: mse(engine, rank, 2, 5, 8))
    engine = start(layer(), 3).eval()
    with torch.no_grad():
        assert engine(input_of(rank, 2, 5, 8)).isfinite().all()
    recurrent = torch.nn.LSTM(4, 5, batch_first=True)
    agree(
        rank,
        lambda: copy.deepcopy(recurrent),
        lambda engine, rank: engine(input_of(rank, 2, 3, 4))[0].square().mean(),
    )


def test_torchs_own_modules(ranks):
    ranks(2, attention)


def checkpointed(rank):
    grads = []
    for use_reentrant in (None, False, True):
        model = Checkpointed(use_reentrant)
        engine = start(model, 3)
        x = torch.arange(6.0).view(2, 3) + rank
        engine.backward(engine(x.requires_grad_()))
        assert sizes(model) == {0}
        grads.append(utils.safe_get_full_model_grads(model))
        engine.step()
    for others in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(others[name], grad, rtol=1e-6, atol=1e-6)


def test_checkpointing_of_both_kinds(ranks):
    ranks(2, checkpointed)


def several(rank):
    model = build(Gpt)
    engine = start(model, 3, gradient_accumulation_steps=2)
    generator = torch.Generator().manual_seed(rank)
    batch = Gpt.batch(generator)
    with torch.no_grad():
        before = engine(batch)
    loss = engine(batch)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.eval()
    with torch.no_grad():
        assert engine(batch).equal(before)
    engine.train()
    engine.step()
    # Two graphs at once, and one that is dropped.
    first, second, _ = (engine(Gpt.batch(generator)) for _ in range(3))
    engine.backward(first)
    engine.backward(second)
    engine.step()
    with torch.no_grad():
        assert engine(batch) < before
    assert sizes(model) == {0}


def test_several_backwards_and_evaluation_between_them(ranks):
    ranks(2, several)


class Experts(torch.nn.Module):
    """Of four experts, a call uses those that it is told."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, chosen):
        return x + sum((self.experts[index](x) for index in chosen), torch.zeros(()))


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.ModuleList(Experts() for _ in range(2))
        self.head = torch.nn.Linear(4, 4)

    def forward(self, x, chosen):
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, chosen)
        return self.head(x).square().mean()


CHOSEN = ((0, 1), (1, 2), ())


def declared(rank, accumulation):
    def forward(engine, rank):
        return engine(input_of(rank, 2, 4), CHOSEN[rank])

    def make():
        model = Mixture()
        assert len(utils.set_z3_leaf_modules(model, [Experts])) == 2
        return model

    agree(rank, make, forward, gradient_accumulation_steps=accumulation, steps=4)
    engine = start(make(), 3)
    before = engine.state_dict()
    step(engine, input_of(rank, 2, 4), CHOSEN[rank])
    after = engine.state_dict()
    moved = [not before[f"blocks.0.experts.{i}.weight"].equal(
        after[f"blocks.0.experts.{i}.weight"]) for i in range(4)]
    assert moved == [True, True, True, False]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_may_skip_parts_of_a_declared_leaf(ranks, accumulation):
    ranks(3, declared, accumulation)


def undeclared(rank, chosen):
    engine = start(Mixture(), 3)
    with pytest.raises(oxizero.EngineError, match="set_z3_leaf_modules") as caught:
        step(engine, input_of(rank, 2, 4), chosen[rank])
    return "\n".join([str(caught.value), *caught.value.__notes__])


def test_an_undeclared_module_that_ranks_skip_is_named(ranks):
    for rank, said in enumerate(ranks(2, undeclared, ((0,), (1,)))):
        assert f"blocks.0.experts.{rank}.weight" in said
        assert f"module `blocks.0.experts.{rank}`" in said
    said = ranks(2, undeclared, ((0, 1), (0,)))
    assert "blocks.0.experts.1.weight" in said[0] and "blocks.1.experts.0.weight" in said[1]


def test_leaves_are_declared_by_class_name_and_suffix():
    model = Mixture()
    assert utils.set_z3_leaf_modules(model, ["Experts"]) == list(model.blocks)
    assert utils.get_z3_leaf_modules(model) == list(model.blocks)
    assert utils.unset_z3_leaf_modules(model, [Experts]) == list(model.blocks)
    assert not utils.z3_leaf_module(model.blocks[0])
    assert utils.set_z3_leaf_modules_by_name(model, ["blocks.1"]) == [model.blocks[1]]
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0.experts"]) == [model.blocks[0].experts]
    with pytest.raises(oxizero.ConfigError, match="no module of Mixture"):
        utils.set_z3_leaf_modules(model, ["Missing"])
    start(model, 3)
    with pytest.raises(oxizero.ConfigError, match="before initialize"):
        utils.set_z3_leaf_modules(model, [Experts])


def test_what_is_sharded_is_not_read():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    engine = start(model, 3)
    weight = model[0].weight
    deeds = [
        lambda: repr(weight),
        lambda: weight.clone(),
        lambda: weight.sum(),
        lambda: weight.data.copy_(torch.zeros(3, 3)),
        lambda: weight.detach().numpy(),
        lambda: weight.tolist(),
        lambda: torch.zeros(3, 3).copy_(weight),
        lambda: torch.save(weight, io.BytesIO()),
        lambda: torch.save(model, io.BytesIO()),
        lambda: copy.deepcopy(model),
        lambda: torch.nn.init.zeros_(weight),
    ]
    for deed in deeds:
        with pytest.raises(RuntimeError, match="the weights of `0.weight` and others are sharded"):
            deed()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()


class Writes(torch.nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


class ChangesInput(torch.nn.Linear):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class Fails(torch.nn.Linear):
    def forward(self, x):
        raise ZeroDivisionError


class Borrows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.second(functional.linear(x, self.first.weight)) + self.first(x)


def test_what_cannot_be_followed_is_named():
    x = torch.ones(1, 3)
    with pytest.raises(oxizero.EngineError, match="`weight` was written while"):
        start(Writes(3, 3), 3)(x)
    with pytest.raises(oxizero.EngineError, match="module `1` changes its input in place"):
        start(torch.nn.Sequential(torch.nn.Linear(3, 3), ChangesInput(3, 3)), 3)(x)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Fails(3, 3))
    with pytest.raises(ZeroDivisionError):
        start(model, 3)(x)
    assert sizes(model) == {0}
    model = Borrows()
    engine = start(model, 3)
    with pytest.raises(RuntimeError, match="storage|`first.weight` and others are sharded"):
        engine(x)
    assert sizes(model) == {0}


def borrows(rank):
    def make():
        model = Borrows()
        zero.register_external_parameter(model, model.first.weight)
        return model

    agree(rank, make, lambda engine, rank: mse(engine, rank, 2, 3))
    model = Borrows()
    engine = start(model, 3)
    zero.register_external_parameter(model, model.first.weight)
    engine.backward(mse(engine, rank, 2, 3))
    engine.step()


def test_a_module_may_use_registered_parameters_of_others(ranks):
    ranks(2, borrows)


def test_a_backward_that_fails_leaves_nothing_whole():
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    hook = model[0].register_forward_hook(lambda _, args, output: Raises.apply(output))
    engine = start(model, 3)
    with pytest.raises(ZeroDivisionError):
        engine.backward(engine(torch.ones(1, 3)).sum())
    assert sizes(model) == {0}
    engine.zero_grad()
    hook.remove()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()


def test_graphs_of_old_weights_are_errors():
    engine = start(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), 3)
    old = engine(torch.ones(1, 3)).sum()
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_empty_and_scalar_parameters():
    class Shapes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.empty = torch.nn.Parameter(torch.zeros(0, 8))
            self.scalar = torch.nn.Parameter(torch.tensor(1.0))
            self.only = torch.nn.ParameterDict({"empty": torch.nn.Parameter(torch.zeros(0))})
            self.child = torch.nn.Embedding(1, 0)

        def forward(self, x):
            return x * self.scalar + self.empty.sum() + self.child(torch.tensor([0])).sum()

    engine = start(Shapes(), 3)
    engine.backward(engine(torch.tensor(2.0)))
    assert utils.safe_get_full_grad(engine.module.empty).shape == (0, 8)
    engine.step()
    assert engine.state_dict()["scalar"].item() == -1.0


def hugging(rank, kind):
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        settings = transformers.GPT2Config(
            vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
        make = transformers.GPT2LMHeadModel
    else:
        settings = transformers.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        )
        make = transformers.LlamaForCausalLM

    def forward(engine, rank):
        tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(rank))
        return engine(input_ids=tokens, labels=tokens).loss

    agree(rank, lambda: make(settings), forward)
    if kind == "llama":
        def checkpointing():
            model = make(settings)
            model.gradient_checkpointing_enable()
            return model

        agree(rank, checkpointing, forward)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_transformers(ranks, kind):
    pytest.importorskip("transformers")
    ranks(2, hugging, kind)



def configured(rank):
    zero_optimization = {
        "stage": 3,
        "leaf_module": {"classes": ["Experts"]},
        "stage3_prefetch_bucket_size": 1e6,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "sub_group_size": 1e9,
    }
    engine = start(Mixture(), 3, zero_optimization=zero_optimization)
    assert utils.get_z3_leaf_modules(engine.module) == list(engine.module.blocks)
    step(engine, input_of(rank, 2, 4), CHOSEN[rank])


def test_the_configuration_declares_leaves(ranks):
    ranks(2, configured)
    classes = {"stage": 3, "leaf_module": {"classes": ["Missing"]}}
    with pytest.raises(oxizero.ConfigError, match="Missing"):
        start(Mixture(), 3, zero_optimization=classes)
