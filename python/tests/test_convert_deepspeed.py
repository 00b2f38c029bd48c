"""Checkpoints that DeepSpeed wrote, as the engine's: those of `make_deepspeed_checkpoints.py`."""

import json
import math
import os
import pathlib
import shutil

import pytest
import torch
from deepspeed_model import CASES, MORE_STEPS, STEPS, Net, adamw, batch
from running import OXIZERO, run, succeed

import oxizero
from oxizero import convert_deepspeed, utils

HERE = pathlib.Path(__file__).parent / "deepspeed_checkpoints"


def converted(case, out):
    written, left = convert_deepspeed.convert(HERE / case, out)
    assert written == out / f"global_step{STEPS}" and left == ['client_state["thing"]']
    return out


def start(case, stage=None):
    of_case, dtype, groups, _ = CASES[case]
    torch.manual_seed(2)  # other weights than the checkpoint's
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": of_case if stage is None else stage},
        "bf16": {"enabled": dtype == "bf16"},
    }
    optimizer = adamw(model, groups)
    for group in optimizer.param_groups:
        group |= {"lr": 1.0, "betas": (0.5, 0.5)}
    return oxizero.initialize(model=model, optimizer=optimizer, config=config)[0]


def has_the_state(rank, case, out, stage):
    engine = start(case, stage)
    _, client_state = engine.load_checkpoint(out)
    assert client_state == {"epoch": 3}
    assert (engine.global_steps, engine.skipped_steps) == (STEPS, 0)
    assert engine.module.shift.item() == 0.25
    truth = json.loads((HERE / case / "truth.json").read_text())
    for name, param in engine.module.named_parameters():
        if param.requires_grad and truth:
            assert utils.safe_get_full_fp32_param(param).tolist() == truth[name].pop("master")
            for key, value in truth[name].items():
                assert utils.safe_get_full_optimizer_state(param, key).tolist() == value
    return engine.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_masters_and_moments_are_those_that_deepspeed_reads_on_any_ranks(ranks, tmp_path, case):
    out = converted(case, tmp_path)
    stage, *_, size = CASES[case]
    states = ranks(size, has_the_state, case, out, stage)
    states += ranks(1, has_the_state, case, out, 3 - stage)
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(value.equal(states[0][name]) for name, value in state.items())


def goes_on(rank, case, out):
    engine = start(case)
    engine.load_checkpoint(out)
    losses = []
    for step in range(STEPS, STEPS + MORE_STEPS):
        loss = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, [dict(group, params=None) for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_in_deepspeed(ranks, tmp_path, case):
    stage, dtype, groups, size = CASES[case]
    told = ranks(size, goes_on, case, converted(case, tmp_path))
    # In bf16 a weight that is rounded to the other side moves a loss by so much.
    tolerance = 1e-6 if dtype == "fp32" else 2e-3
    for rank, (losses, settings) in enumerate(told):
        expected = json.loads((HERE / case / f"losses{rank}.json").read_text())
        if stage < 3:  # in which DeepSpeed's linear layers are torch's
            assert losses[0] == expected[0]
        assert losses == pytest.approx(expected, rel=tolerance)
        wanted = [dict(group, params=None) for group in adamw(Net(), groups).param_groups]
        for name in ("lr", "betas", "eps", "weight_decay"):
            assert [group[name] for group in settings] == [group[name] for group in wanted]


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(HERE / "stage1", tmp_path / "saved")
    return tmp_path / "saved" / f"global_step{STEPS}"


def refused(copy, why):
    out = copy.parent.parent / "out"
    with pytest.raises(oxizero.EngineError, match=why):
        convert_deepspeed.convert(copy.parent, out)
    assert not out.exists() or os.listdir(out) == []


def test_what_is_missing_is_named(copy):
    (copy / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    refused(copy, "saved by 2 ranks, and has 1")
    (copy / "mp_rank_00_model_states.pt").unlink()
    refused(copy, "saved by 2 ranks")
    for path in copy.glob("zero_*"):
        path.unlink()
    refused(copy, "no .*zero_pp_rank")


def test_other_parallelism_is_refused_by_its_file(copy):
    (copy / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    refused(copy, "mp_rank_01_optim_states.pt` is of tensor-parallel ranks")


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Getattr:
    def __reduce__(self):
        return getattr, (torch.Tensor, "tofile")


def test_nothing_that_a_file_names_is_run(copy, tmp_path):
    path = copy / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    for harm in (Harm(str(tmp_path / "harm")), Getattr()):
        torch.save(model | {"harm": harm}, path)
        refused(copy, "mp_rank_00_model_states.pt` is not read")
    assert not (tmp_path / "harm").exists()


def test_what_json_does_not_have_is_kept_and_what_checkpoints_do_not_hold_is_named(copy, tmp_path):
    path = copy / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=True)
    told = {"best": math.inf, "seen": {1: (2, 3)}, "lr_scheduler": {"x": torch.ones(2)}}
    torch.save(model | told, path)
    _, left = convert_deepspeed.convert(copy.parent, tmp_path / "out")
    assert left == ['client_state["thing"]', "lr_scheduler"]
    _, client_state = start("stage1").load_checkpoint(tmp_path / "out")
    assert client_state == {"epoch": 3, "best": math.inf, "seen": {1: (2, 3)}}


def test_the_command_says_where_it_wrote_or_why_not(copy, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert_deepspeed.main([str(copy), str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out / copy.name}\n"
    assert said.err == 'left out, for checkpoints do not hold them: client_state["thing"]\n'
    assert (out / "latest").read_text() == f"{copy.name}\n"
    assert convert_deepspeed.main([str(tmp_path), str(out)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_package_s_command_converts_too(copy, tmp_path):
    out = tmp_path / "out"
    words = [*OXIZERO, "convert", "--from", "deepspeed"]
    assert succeed([*words, copy, out]) == f"{out / copy.name}\n"
    assert (out / "latest").read_text() == f"{copy.name}\n"
    ended = run([*words, tmp_path, tmp_path / "other"])
    assert ended.returncode == 1 and ended.stderr.startswith("error: ")
    ended = run([*OXIZERO, "convert", copy, out, "--to", "safetensors"])
    assert ended.returncode == 2 and "--from" in ended.stderr
