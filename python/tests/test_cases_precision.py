"""What is kept of a gradient's and a weight's precision on their ways."""

import pytest
import torch
from claims import BF16, Claims, Given, backward, grads, masters, window

import oxizero
from oxizero import utils

FP16 = {"enabled": True, "loss_scale": 1}
OF_MODEL = {"fp32": {}, "bf16": {"bf16": BF16}, "fp16": {"fp16": FP16}}

claims = Claims()


@claims()
def a_mean_is_not_rounded_to_the_dtype_that_travels(at):
    for wire in ("bf16", "fp32"):
        engine = at.start(Given(w=[0.0]), bf16=BF16, communication_data_type=wire)
        backward(engine, w=(1.0, 1.0078125)[at.rank])
        assert grads(engine) == {"w": [1.00390625]}
        assert utils.safe_get_full_grad(engine.module.w).dtype == torch.float32
        engine.step()
        assert masters(engine) == {"w": [-1.00390625]}


@claims()
def nor_is_one_of_several_micro_batches(at):
    for wire in ("bf16", "fp32"):
        engine = at.start(
            Given(w=[0.0]), bf16=BF16, communication_data_type=wire, gradient_accumulation_steps=2
        )
        window(engine, {"w": 1.0})
        backward(engine, w=(1.0, 1.015625)[at.rank])
        assert grads(engine) == {"w": [1.00390625]}


@claims(ranks=1)
def small_gradients_after_a_large_one_are_not_lost(at):
    micro_batches = [{"w": 1.0}] + [{"w": 2.0**-9}] * 256
    engine = at.start(Given(w=[0.0]), bf16=BF16)
    with engine.coalesce_grad_reduction():
        for gradients in micro_batches:
            backward(engine, **gradients)
    assert grads(engine) == {"w": [1.5]}
    engine = at.start(Given(w=[0.0]), bf16=BF16, gradient_accumulation_steps=257)
    window(engine, *micro_batches[:-1])
    backward(engine, **micro_batches[-1])
    mean = torch.tensor(1.5) / 257
    assert grads(engine) == {"w": [mean.item()]}


@claims()
def what_cancels_leaves_the_rest(at):
    for precision in OF_MODEL.values():
        engine = at.start(Given(w=[0.0]), **precision)
        with engine.coalesce_grad_reduction():
            for gradient in (256.0, 1.0, -256.0):
                backward(engine, w=gradient)
        assert grads(engine) == {"w": [1.0]}
        engine = at.start(Given(w=[0.0]), gradient_accumulation_steps=4, **precision)
        window(engine, *({"w": gradient} for gradient in (256.0, 1.0, -256.0)))
        backward(engine, w=3.0)
        assert grads(engine) == {"w": [1.0]}


@claims(ranks=3)
def what_cancels_over_ranks_leaves_the_rest(at):
    engine = at.start(Given(w=[0.0]), bf16=BF16)
    backward(engine, w=(256.0, 3.0, -256.0)[at.rank])
    assert grads(engine) == {"w": [1.0]}


@claims(ranks=1)
def the_accumulator_has_the_dtype_that_was_asked_for(at):
    for model, accumulate, total in (
        ("bf16", "bf16", 256.0),
        ("fp16", "fp16", 257.0),
        ("bf16", "fp32", 257.0),
        ("fp16", "fp32", 257.0),
        ("fp32", "fp32", 257.0),
    ):
        precision = OF_MODEL[model] | {"data_types": {"grad_accum_dtype": accumulate}}
        engine = at.start(Given(w=[0.0]), **precision)
        with engine.coalesce_grad_reduction():
            backward(engine, w=256.0)
            backward(engine, w=1.0)
        assert grads(engine) == {"w": [total]}
        engine = at.start(Given(w=[0.0]), gradient_accumulation_steps=2, **precision)
        window(engine, {"w": 256.0})
        backward(engine, w=1.0)
        assert grads(engine) == {"w": [total / 2]}


@claims(ranks=1)
def narrow_parameters_of_an_f32_model_accumulate_in_f32(at):
    engine = at.start(Given(w=torch.zeros(1, dtype=torch.bfloat16), v=[0.0]))
    with engine.coalesce_grad_reduction():
        backward(engine, w=256.0, v=2.0)
        backward(engine, w=1.0)
    assert grads(engine) == {"w": [257.0], "v": [2.0]}


@claims(ranks=3)
def three_ranks_of_one_average_to_one(at):
    for precision in OF_MODEL.values():
        engine = at.start(Given(w=[2.0]), **precision)
        backward(engine, w=1.0)
        assert grads(engine) == {"w": [1.0]}
        engine.step()
        assert masters(engine) == {"w": [1.0]} and engine.get_global_grad_norm() == 1.0


@claims()
def a_windows_mean_keeps_its_small_parts(at):
    engine = at.start(Given(w=[0.0]), bf16=BF16, gradient_accumulation_steps=4)
    window(engine, *({"w": gradient} for gradient in (4.0, 1 / 64, 1 / 64)))
    backward(engine, w=1 / 64)
    assert grads(engine) == {"w": [1.01171875]}
    engine.step()
    assert masters(engine) == {"w": [-1.01171875]}


@claims(ranks=8)
def gradients_whose_sum_overflows_fp16_average(at):
    for precision in (OF_MODEL["fp16"], {"communication_data_type": "fp16"}):
        engine = at.start(Given(w=[0.0] * 3), **precision)
        backward(engine, w=10000.0)
        assert grads(engine) == {"w": [10000.0] * 3}
        engine.step()
        assert engine.skipped_steps == 0 and masters(engine) == {"w": [-10000.0] * 3}


@claims()
def masters_move_where_model_weights_cannot(at):
    model = Given(w=[1.0])
    engine = at.start(model, torch.optim.SGD(model.parameters(), lr=0.001), bf16=BF16)
    window(engine, *[{"w": 1.0}] * 10)
    assert masters(engine) == {"w": torch.tensor([0.99000013]).tolist()}
    weight = engine.state_dict()["w"]
    assert weight.dtype == torch.bfloat16 and weight.tolist() == [0.98828125]


@claims()
def a_norm_adds_in_more_than_the_gradients_have(at):
    for model in ("bf16", "fp16"):
        engine = at.start(Given(w=torch.zeros(4096)), **OF_MODEL[model])
        window(engine, {"w": torch.ones(4096)})
        assert engine.get_global_grad_norm() == 64.0
    for scale in (1, 128):
        engine = at.start(Given(w=[0.0]), fp16={"enabled": True, "loss_scale": scale})
        backward(engine, w=300.0)
        assert engine.clip_grad_norm_(1e6) == 300.0
        engine.step()
        assert engine.get_global_grad_norm() == 300.0 and masters(engine) == {"w": [-300.0]}


@claims()
def parameters_of_several_dtypes_in_one_module_keep_their_own(at):
    given = {
        "p0": torch.tensor([1.0], dtype=torch.bfloat16),
        "p1": torch.tensor([1.00390625]),
        "p2": torch.tensor([1.0009765625], dtype=torch.float16),
    }
    for bucket in (1, None):
        engine = at.start(Given(**given), bucket=bucket)
        window(engine, dict.fromkeys(given, 0.0), {"p1": 0.0})
        whole = engine.state_dict()
        for name, value in given.items():
            assert whole[name].dtype == value.dtype and whole[name].equal(value)
        with oxizero.zero.GatheredParameters(engine.module):
            for name, param in engine.module.named_parameters():
                assert param.dtype == given[name].dtype and param.equal(given[name])
        assert masters(engine) == {name: value.tolist() for name, value in given.items()}


@claims()
def buffers_keep_their_dtypes(at):
    buffers = {
        "f32": torch.tensor(0.1333521432),
        "f64": torch.tensor([0.1, 1e300], dtype=torch.float64),
        "f16": torch.tensor([[0.1]], dtype=torch.float16),
        "count": torch.tensor(2**40 + 1),
        "empty": torch.zeros(0, 3),
        "absent": None,
    }
    model = Given(w=[1.0])
    for name, value in buffers.items():
        own = value if value is None or at.rank == 0 else torch.zeros_like(value)
        model.register_buffer(name, own)
    engine = at.start(model, bf16=BF16)
    window(engine, {"w": 1.0})
    for name, value in buffers.items():
        held = getattr(model, name)
        assert held is value is None or held.dtype == value.dtype and held.equal(value)


@pytest.mark.parametrize("case", claims.cases())
def test_precision(case):
    claims.check(case)
