"""torch's own calls, made of a model that an engine has."""

import pytest
import torch
from test_access import Constant, start

import oxizero
from oxizero import torch_calls
from oxizero.utils import safe_get_full_grad


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Constant(2), Constant(2)

    def forward(self, gradient):
        return self.left(gradient) + self.right(gradient)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("of", [lambda engine: engine.module, lambda engine: engine])
def test_zero_grad_of_a_model_is_the_engines(stage, of):
    engine = start(Pair(), stage)
    engine.backward(engine(100.0))
    of(engine).zero_grad()
    engine.backward(engine(1.0))
    weight = engine.module.left.weight
    assert safe_get_full_grad(weight).tolist() == [1.0, 1.0]
    engine.step()
    of(engine).zero_grad()


def test_zero_grad_of_what_holds_several_models_is_each_engines():
    pair = torch.nn.ModuleList([Constant(2), Constant(2)])
    engines = [start(model, 1) for model in pair]
    for gradient in [100.0, 1.0]:
        pair.zero_grad()
        for engine in engines:
            engine.backward(engine(gradient))
    assert [safe_get_full_grad(model.weight).tolist() for model in pair] == [[1.0, 1.0]] * 2


def test_zero_grad_of_a_part_is_refused_where_it_would_do_nothing():
    engine = start(Pair(), 2)
    engine.module.left.zero_grad()
    engine.backward(engine(1.0))
    with pytest.raises(oxizero.EngineError, match="`left.weight` would give up.*of a part"):
        engine.module.left.zero_grad()
    engine.step()
    engine.module.left.zero_grad()


def test_zero_grad_in_a_window_says_what_to_call():
    engine = start(Constant(2), 1, gradient_accumulation_steps=2)
    engine.backward(engine(1.0))
    engine.step()
    with pytest.raises(oxizero.EngineError, match="give up 1 micro-batches of the 2"):
        engine.module.zero_grad()
    engine.discard_window()
    engine.module.zero_grad()


def test_a_module_without_an_engine_is_torchs():
    engine = start(Constant(2), 1)
    other = torch.nn.Linear(2, 1)
    other(torch.ones(2)).sum().backward()
    other.zero_grad()
    assert other.weight.grad is None
    del engine


def test_the_norm_of_no_gradients_is_warned_of(monkeypatch):
    monkeypatch.setattr(torch_calls, "_has_warned", False)
    engine = start(Constant(2), 2)
    total = torch.nn.utils.get_total_norm
    assert total([torch.ones(4)]) == 2.0
    engine.backward(engine(1.0))
    grads = [param.grad for param in engine.module.parameters() if param.grad is not None]
    with pytest.warns(UserWarning, match="get_total_norm finds no gradients"):
        total(grads)
    engine.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("of", [lambda engine: engine.module, lambda engine: engine])
def test_a_model_is_converted_before_it_is_an_engines(stage, of):
    engine = start(Pair(), stage)
    deeds = [
        lambda module: module.half(),
        lambda module: module.to(torch.float64),
        lambda module: module.to("meta"),
        lambda module: module.to_empty(device="cpu"),
    ]
    for deed in deeds:
        with pytest.raises(oxizero.EngineError, match="left.weight` is the engine's, and cannot"):
            deed(of(engine))
    of(engine).to("cpu").float()
    engine.backward(engine(1.0))
    engine.step()
    model = engine.module
    engine.destroy()
    assert model.half().left.weight.tolist() == [-1.0] * 2


def test_windows_that_end_early_count_what_they_held():
    engine = start(Constant(2), 1, gradient_accumulation_steps=4, train_batch_size=8)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(1.0))
    engine.step()
    assert (engine.global_samples, engine.was_step_applied()) == (2, True)
    engine.set_gradient_accumulation_boundary(None)
    for applied in [False, False, False, True]:
        engine.backward(engine(1.0))
        engine.step()
        assert engine.was_step_applied() == applied
    assert engine.global_samples == 10


def test_a_dtype_that_is_not_taken_is_named_once():
    with pytest.raises(ValueError, match="^parameter `weight`: `float64` parameters; the engine"):
        start(Constant(dtype=torch.float64), 1)
