"""Gradients that are read and written: when, by whom, and of which parameters."""

import pytest
import torch
from claims import BF16, Claims, Given, backward, grads, masters, window

import oxizero
from oxizero import torch_backend, utils

claims = Claims()


@claims(back_ends=["torch"])
def a_models_gradients_are_read_in_one_collective_a_dtype(at):
    narrow = torch.zeros(3, dtype=torch.bfloat16)
    for kinds in (1, 2):
        values = [torch.zeros(3)] + [narrow] * (kinds - 1)
        model = Given(**{f"p{index}": values[index % kinds] for index in range(1000)})
        engine = at.start(model)
        backward(engine, **dict.fromkeys(dict(model.named_parameters()), 1.0 + at.rank))
        engine.clip_grad_norm_(1e6)  # what the window's end takes is done
        with pytest.MonkeyPatch.context() as patch:
            moved = []
            for name in ("all_to_all", "all_gather", "broadcast"):
                patch.setattr(torch_backend.Group, name, noted(name, moved))
            told = utils.safe_get_full_model_grads(engine)
        # Gradients of both kinds of parameters are f32.
        assert moved == ([] if at.stage == 0 else ["all_gather"])
        assert len(told) == 1000 and all(grad.tolist() == [1.5] * 3 for grad in told.values())


def noted(name, calls):
    """A group's method that leaves a note of each call."""
    original = getattr(torch_backend.Group, name)

    def method(*given):
        calls.append(name)
        return original(*given)

    return method


@claims()
def what_is_set_to_what_it_is_stays_and_twice_the_gradient_moves_twice_as_far(at):
    for half in ({}, {"bf16": BF16}):
        engine = at.start(Given(w=[0.0] * 5, v=[0.0]), **half)
        gradients = {"w": [0.1, 1.0, -3.0, 1e-30, 7.0], "v": 5.0}
        backward(engine, **gradients)
        before = grads(engine)
        for param in engine.module.parameters():
            utils.safe_set_full_grad(param, utils.safe_get_full_grad(param))
            utils.safe_set_local_grad(param, utils.safe_get_local_grad(param))
        assert grads(engine) == before
        for param in engine.module.parameters():
            utils.safe_set_full_grad(param, 2 * utils.safe_get_full_grad(param))
        engine.step()
        expected = {name: [-2 * value for value in grad] for name, grad in before.items()}
        assert masters(engine) == expected


@claims()
def gradients_are_there_between_the_last_backward_and_the_step(at):
    engine = at.start(Given(w=[0.0]), gradient_accumulation_steps=2)
    weight, ones = engine.module.w, torch.ones(1)
    uses = [
        lambda: utils.safe_get_full_grad(weight),
        lambda: utils.safe_get_local_grad(weight),
        lambda: utils.safe_get_full_model_grads(engine),
        lambda: utils.safe_set_full_grad(weight, ones),
        lambda: utils.safe_set_local_grad(weight, utils.safe_get_local_fp32_param(weight)),
        lambda: engine.clip_grad_norm_(1.0),
    ]

    def refused(said):
        for use in uses:
            with pytest.raises(oxizero.EngineError, match=said):
                use()

    for _ in range(2):
        window(engine, {"w": 1.0})
        refused("1 of 2 micro-batches")
        backward(engine, w=3.0)
        assert grads(engine) == {"w": [2.0]}
        engine.step()
        refused("consumed by the last step")
    refused("consumed by the last step")
    assert masters(engine) == {"w": [-4.0]}


@claims()
def before_any_backward_there_are_none(at):
    engine = at.start(Given(w=[0.0]))
    for use in (utils.safe_get_full_grad, utils.safe_get_local_grad):
        with pytest.raises(oxizero.EngineError, match="not ready"):
            use(engine.module.w)
    with pytest.raises(oxizero.EngineError, match="not ready"):
        utils.safe_get_full_model_grads(engine)


@claims()
def frozen_empty_and_unused_parameters_have_none_an_empty_one_and_zeros(at):
    for bucket in (1, None):
        model = Given(frozen=[1.0], empty=torch.zeros(0, 8), unused=[1.0, 1.0], used=[1.0])
        model.frozen.requires_grad_(False)
        engine = at.start(model, bucket=bucket)
        backward(engine, used=2.0, frozen=1.0)
        told = utils.safe_get_full_model_grads(engine)
        assert list(told) == ["empty", "unused", "used"]
        assert utils.safe_get_full_grad(model.frozen) is None
        assert utils.safe_get_local_grad(model.frozen) is None
        with pytest.raises(oxizero.EngineError, match="`frozen`: it is frozen"):
            utils.safe_set_full_grad(model.frozen, torch.ones(1))
        for found in (told["empty"], utils.safe_get_full_grad(model.empty)):
            assert found.shape == (0, 8) and found.dtype == torch.float32
        for found in (told["unused"], utils.safe_get_full_grad(model.unused)):
            assert found.tolist() == [0.0, 0.0]
        engine.step()
        whole = {name: weight.tolist() for name, weight in engine.state_dict().items()}
        assert whole == {"frozen": [1.0], "empty": [], "unused": [1.0, 1.0], "used": [-1.0]}


@claims()
def a_rank_that_sets_alone_is_told_and_so_are_the_others(at):
    engine = at.start(Given(w=[0.0] * 4))
    backward(engine, w=1.0)
    with pytest.raises(oxizero.EngineError, match="set_full_grad|exchange|same calls"):
        if at.rank == 0:
            utils.safe_set_full_grad(engine.module.w, torch.ones(4))
        else:
            engine.step()


@claims(stages=(1, 2, 3))
def each_rank_sets_its_own_part(at):
    """Each takes its part of the values that it was given."""
    engine = at.start(Given(w=torch.zeros(32)))
    backward(engine, w=1.0)
    given = torch.arange(32.0)
    utils.safe_set_full_grad(engine.module.w, given + 100 * at.rank)
    expected = torch.cat((given[:16], given[16:] + 100))
    assert grads(engine) == {"w": expected.tolist()}
    engine.step()
    assert masters(engine) == {"w": (-expected).tolist()}


@claims(ranks=3)
def elements_that_three_ranks_do_not_have_alike_are_read_and_written_whole(at):
    for numel in (5, 41):
        whole(at, torch.linspace(-1e10, 3.0, numel))


def whole(at, given):
    engine = at.start(Given(w=torch.zeros_like(given)))
    weight = engine.module.w
    backward(engine, w=given * (at.rank + 1))
    assert torch.tensor(grads(engine)["w"]).equal(((given + given * 2) + given * 3) / 3)
    utils.safe_set_full_grad(weight, given)
    assert utils.safe_get_full_grad(weight).equal(given)
    parts = utils.safe_get_local_grad(weight)
    engine.step()
    assert utils.safe_get_full_fp32_param(weight).equal(-given)
    utils.safe_set_full_fp32_param(weight, given)
    assert utils.safe_get_full_fp32_param(weight).equal(given)
    assert engine.state_dict()["w"].equal(given)
    # A shard is a multiple of 16 elements.
    assert parts.equal(given if at.stage == 0 else given[16 * at.rank : 16 * (at.rank + 1)])


@claims()
def a_parameter_that_another_rank_owns_is_read_whole_and_by_all(at):
    engine = at.start(Given(a=[0.0, 0.0], b=[0.0, 0.0]))
    backward(engine, a=[1.0, 2.0 + at.rank], b=[3.0, 4.0])
    assert grads(engine) == {"a": [1.0, 2.5], "b": [3.0, 4.0]}
    owned = [utils.safe_get_local_grad(param).numel() for param in engine.module.parameters()]
    assert owned == ([2, 2] if at.stage == 0 else [[2, 0], [0, 2]][at.rank])
    utils.safe_set_full_grad(engine.module.b, torch.tensor([5.0, 6.0]))
    assert grads(engine) == {"a": [1.0, 2.5], "b": [5.0, 6.0]}


@claims()
def each_parameters_norm_is_that_of_its_whole_gradient(at):
    for bucket in (1, None):
        engine = at.start(Given(a=[0.0] * 5, b=[0.0], unused=[0.0]), bucket=bucket)
        backward(engine, a=[3.0 + at.rank, 0.0, 0.0, 0.0, 12.0 * at.rank], b=-2.0)
        norms = engine._core.grad_norms()
        assert norms[1:] == [2.0, 0.0]
        for norm, grad in zip(norms, grads(engine).values(), strict=True):
            assert norm == torch.tensor(grad, dtype=torch.float64).norm().item()


@claims()
def a_parameter_that_no_engine_knows_has_none_and_harms_no_other(at):
    model = Given(w=[0.0])
    engine = at.start(model)
    stranger = torch.nn.Parameter(torch.ones(2))
    backward(engine, w=1.0 + at.rank)
    # One rank asks, and the others need not.
    if at.rank == 1:
        for get in (
            utils.safe_get_full_grad,
            utils.safe_get_local_grad,
            utils.safe_get_full_fp32_param,
            utils.safe_get_local_fp32_param,
            lambda param: utils.safe_get_full_optimizer_state(param, "exp_avg"),
        ):
            assert get(stranger) is None
        for put in (
            utils.safe_set_full_grad,
            utils.safe_set_local_grad,
            utils.safe_set_full_fp32_param,
        ):
            assert put(stranger, torch.ones(2)) is None
        assert stranger.tolist() == [1.0, 1.0]
    assert grads(engine) == {"w": [1.5]}
    model.register_parameter("late", stranger)
    assert list(utils.safe_get_full_model_grads(engine)) == ["w"]


@pytest.mark.parametrize("case", claims.cases())
def test_access(case):
    claims.check(case)
