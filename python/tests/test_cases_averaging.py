"""What a window adds up to, and is divided by."""

import pytest
from claims import BF16, Claims, Given, backward, grads, masters, window

import oxizero

claims = Claims()


@claims()
def every_micro_batch_of_every_rank_counts(at):
    engine = at.start(Given(w=[0.0]), bf16=BF16, gradient_accumulation_steps=2)
    for steps in (1, 2):
        first, second = ((1.0, 3.0), (5.0, 7.0))[at.rank]
        window(engine, {"w": first})
        backward(engine, w=second)
        assert grads(engine) == {"w": [4.0]}
        engine.step()
        assert masters(engine) == {"w": [-4.0 * steps]}


@claims()
def every_backward_before_a_step_counts(at):
    engine = at.start(Given(w=[0.0]))
    for steps in (1, 2):
        backward(engine, w=1.0)
        backward(engine, w=2.0)
        assert grads(engine) == {"w": [3.0]}
        engine.step()
        assert masters(engine) == {"w": [-3.0 * steps]}


@claims()
def a_boundary_that_the_caller_says_counts_the_micro_batches_before_it(at):
    engine = at.start(Given(w=[0.0]))
    for steps in (1, 2):
        engine.set_gradient_accumulation_boundary(False)
        window(engine, {"w": 1.0})
        engine.set_gradient_accumulation_boundary(True)
        backward(engine, w=2.0)
        assert grads(engine) == {"w": [1.5]}
        engine.step()
        assert masters(engine) == {"w": [-1.5 * steps]}


@claims()
def every_window_starts_at_zero(at):
    engine = at.start(Given(w=[0.0], v=[0.0, 0.0]), gradient_accumulation_steps=4)
    for steps in (1, 2):
        micro_batches = [{"w": n, "v": [n, -n]} for n in (1.0, 2.0, 3.0, 4.0)]
        window(engine, *micro_batches[:3])
        backward(engine, **micro_batches[3])
        assert grads(engine) == {"w": [2.5], "v": [2.5, -2.5]}
        engine.step()
        assert masters(engine) == {"w": [-2.5 * steps], "v": [-2.5 * steps, 2.5 * steps]}


@claims()
def tokens_weigh_the_same_where_losses_are_divided_by_a_ranks_share_of_them(at):
    """Five tokens whose gradients are 1 on one rank, and one with 10 on the other."""
    engine = at.start(Given(w=[0.0]))
    total = (5.0 * 1.0, 1.0 * 10.0)[at.rank]
    share = (5 + 1) / engine.world_size
    engine.backward(engine(w=total) / share)
    assert grads(engine) == {"w": [2.5]}


@claims()
def a_sum_is_refused_with_what_gives_it(at):
    with pytest.raises(oxizero.ConfigError, match='gradient_allreduce_op = "sum".*multiply the lo'):
        at.start(Given(w=[0.0]), gradient_allreduce_op="sum")
    engine = at.start(Given(w=[0.0]), bf16=BF16)
    engine.backward(engine(w=(1.0, 3.0)[at.rank]) * engine.world_size)
    assert grads(engine) == {"w": [4.0]}


@claims()
def a_window_that_ends_early_is_divided_by_what_it_held(at):
    engine = at.start(Given(w=[0.0]), bf16=BF16, gradient_accumulation_steps=4)
    window(engine, {"w": 2.0})
    engine.set_gradient_accumulation_boundary(True)
    backward(engine, w=4.0)
    assert grads(engine) == {"w": [3.0]}
    engine.step()
    assert masters(engine) == {"w": [-3.0]}
    engine.set_gradient_accumulation_boundary(None)
    window(engine, *[{"w": 8.0}] * 4)
    assert masters(engine) == {"w": [-11.0]}


@claims()
def a_parameter_that_one_micro_batch_uses_is_divided_as_the_others(at):
    for bucket in (1, None):
        for first, second in (({"p": 4.0, "q": 1.0}, {"q": 3.0}), ({"q": 1.0}, {"p": 4.0, "q": 3})):
            model = Given(p=[0.0], q=[0.0])
            engine = at.start(model, bucket=bucket, bf16=BF16, gradient_accumulation_steps=2)
            for steps in (1, 2):
                window(engine, first)
                backward(engine, **second)
                assert grads(engine) == {"p": [2.0], "q": [2.0]}
                engine.step()
                assert masters(engine) == {"p": [-2.0 * steps], "q": [-2.0 * steps]}


@claims()
def a_parameter_that_one_rank_uses_is_divided_as_the_others(at):
    engine = at.start(Given(p=[0.0], q=[0.0]), bucket=1)
    backward(engine, **({"p": 4.0, "q": 1.0}, {"q": 3.0})[at.rank])
    assert grads(engine) == {"p": [2.0], "q": [2.0]}


@claims()
def batch_sizes_that_disagree_are_refused_by_name(at):
    sizes = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }
    said = "`train_batch_size = 16`.* not 2 .gradient_accumulation_steps.*leave one"
    with pytest.raises(oxizero.ConfigError, match=said):
        at.start(Given(w=[0.0]), **sizes)
    engine = at.start(Given(w=[0.0]), **sizes | {"train_batch_size": 8})
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (2, 8)


@claims()
def a_constant_gradient_stays_constant(at):
    for config in ({}, {"bf16": BF16}, {"gradient_accumulation_steps": 2}):
        engine = at.start(Given(w=[0.0]), **config)
        accumulation = config.get("gradient_accumulation_steps", 1)
        for steps in range(1, 6):
            window(engine, *[{"w": 1.0}] * (accumulation - 1))
            backward(engine, w=1.0)
            assert grads(engine) == {"w": [1.0]}
            engine.step()
            assert masters(engine) == {"w": [-1.0 * steps]}


@pytest.mark.parametrize("case", claims.cases())
def test_averaging(case):
    claims.check(case)
