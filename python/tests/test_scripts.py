"""Scripts that were written for DeepSpeed."""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import free_port

import oxizero
from oxizero import checkpointing, comm

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 2,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": True},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 8, "warmup_max_lr": 0.02, "warmup_num_steps": 2},
    },
    "activation_checkpointing": {"partition_activations": True, "profile": False},
    "wall_clock_breakdown": False,
}


def test_a_script_for_deepspeed_runs_with_another_import(tmp_path):
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    said = start_script(2, tmp_path)
    assert "saving" in said[0] and "saving" not in said[1] and "training" in said[1]
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["steps"] == [6, 0, 96]
    assert (told["world"], told["device"]) == (2, "cpu")
    assert told["lr"] == pytest.approx(0.02 * (8 - 5) / (8 - 2))
    assert told["losses"][-1] < 0.8 * told["losses"][0]
    names = ["body.weight", "body.bias", "head.weight", "head.bias"]
    assert list(torch.load(tmp_path / "model.pt")) == names


def start_script(size, folder):
    """Runs `deepspeed_script.py` in the folder; what each rank printed."""
    places = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(oxizero.__file__).parents[1]),
    }
    script = Path(__file__).with_name("deepspeed_script.py")
    command = [sys.executable, script, "--deepspeed", "--deepspeed_config", "ds_config.json"]
    ranks = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | places | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(said)
    return said


def test_arguments_have_deepspeeds_names():
    parser = oxizero.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "x.json")
    assert vars(parser.parse_args([])) == {"deepspeed": False, "deepspeed_config": None}


def collectives(rank):
    assert (comm.get_rank(), comm.get_local_rank(), comm.get_world_size()) == (rank, rank, 3)
    sums = torch.tensor([[1, 2], [3, 4]]) * (rank + 1)
    comm.all_reduce(sums)
    product = torch.tensor(float(rank + 1), dtype=torch.bfloat16)
    comm.all_reduce(product, comm.ReduceOp.PRODUCT, async_op=True).wait()
    largest = torch.tensor([rank % 2, 1 - rank], dtype=torch.int8)
    comm.all_reduce(largest, op=comm.ReduceOp.MAX)
    told = torch.full((3,), float(rank))
    comm.broadcast(told, 1)
    flags = [torch.empty(1, dtype=torch.bool) for _ in range(3)]
    comm.all_gather(flags, torch.tensor([rank == 1]))
    joined = torch.empty(6)
    comm.all_gather_into_tensor(joined, torch.tensor([rank, -rank]).float())
    comm.barrier()
    return [tensor.tolist() for tensor in (sums, product, largest, told, *flags, joined)]


EXPECTED = [
    [[6, 12], [18, 24]],
    6.0,
    [1, 1],
    [1.0] * 3,
    [False],
    [True],
    [False],
    [0.0, -0.0, 1.0, -1.0, 2.0, -2.0],
]


def test_collectives_need_no_torch_distributed(ranks):
    assert ranks(3, collectives) == [EXPECTED] * 3


def of_any_dtype(rank):
    for name in ("bool", "uint8", "int16", "int64", "bfloat16", "float64", "complex128"):
        for shape in ((), (0,), (3,), (2, 5)):
            sent = [torch.full(shape, r % 2, dtype=getattr(torch, name)) for r in range(3)]
            told = [torch.empty_like(one) for one in sent]
            comm.all_gather(told, sent[rank])
            assert all(map(torch.equal, told, sent)), (name, shape)


def test_collectives_take_tensors_of_any_dtype_and_shape(ranks):
    ranks(3, of_any_dtype)


def meets_in_a_fork(rank):
    comm.barrier()
    if rank == 0:
        if (child := os.fork()) == 0:
            signal.alarm(5)
            try:
                comm.barrier()
            except oxizero.EngineError as error:
                os._exit(7 if "forked from a rank's" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    told = torch.tensor([rank])
    comm.all_reduce(told)
    return told.item()


def test_a_fork_takes_no_part_in_collectives(ranks):
    assert ranks(2, meets_in_a_fork) == [1, 1]


def of_torch(rank):
    torch.distributed.init_process_group("gloo")
    told = collectives(rank)
    assert type(comm.all_reduce(torch.zeros(1), async_op=True)) is not comm._Done
    group = comm.new_group([0, 2])
    if rank != 1:
        value = torch.tensor(1.0)
        comm.all_reduce(value, group=group)
        assert value.item() == 2.0
    comm.destroy_process_group()
    return told


def test_collectives_are_torchs_where_it_is_initialized(ranks):
    assert ranks(3, of_torch) == [EXPECTED] * 3


def average(rank):
    mean = torch.tensor(float(rank), dtype=torch.bfloat16)
    comm.all_reduce(mean, comm.ReduceOp.AVG)
    return mean.item()


def test_an_average_is_one_of_ranks(ranks):
    assert ranks(2, average) == [0.5, 0.5]


def rounded_once(rank):
    told = torch.tensor([(256.0, 1.0, 1.0, 1.0)[rank]], dtype=torch.bfloat16)
    oxizero.comm.all_reduce(told)
    assert told.item() == 260.0
    with pytest.raises(oxizero.ConfigError, match="it is no integer"):
        oxizero.comm.all_reduce(torch.tensor([3]), op=oxizero.comm.ReduceOp.AVG)


def test_sums_of_16_bit_numbers_are_rounded_once(ranks):
    ranks(4, rounded_once)


def test_a_group_is_torchs():
    with pytest.raises(oxizero.ConfigError, match="init_process_group"):
        comm.barrier(group=object())


def test_ranks_know_each_other_once_somebody_asked(monkeypatch):
    monkeypatch.setattr("oxizero.world._is_initialized", False)
    assert not comm.is_initialized()
    oxizero.init_distributed(auto_mpi_discovery=False, verbose=True, rank=-1)
    assert comm.is_initialized()
    with pytest.raises(oxizero.ConfigError, match="init_distributed.rank=1"):
        oxizero.init_distributed(rank=1)


def test_checkpointing_is_configured_or_refused_by_name(tmp_path):
    section = {"partition_activations": True, "number_checkpoints": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"activation_checkpointing": section}))
    checkpointing.configure(None, deepspeed_config=path)
    assert checkpointing.is_configured()
    checkpointing.reset()
    with pytest.raises(oxizero.ConfigError, match="activation_checkpointing.cpu_checkpointing"):
        checkpointing.configure(None, checkpoint_in_cpu=True)


def test_a_checkpointed_function_gives_the_same_gradient():
    weight = torch.nn.Parameter(torch.arange(4.0))
    calls = []

    def function(x, power):
        calls.append(x.item())
        return (weight**power).sum() * x

    checkpointing.checkpoint(function, torch.tensor(2.0), power=2).backward()
    assert weight.grad.tolist() == [0.0, 4.0, 8.0, 12.0] and calls == [2.0, 2.0]


NAMES = """
import oxizero as deepspeed
from oxizero.accelerator import get_accelerator
from oxizero.ops.adagrad import DeepSpeedCPUAdagrad
from oxizero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from oxizero.ops.lion import DeepSpeedCPULion, FusedLion
from oxizero.runtime.lr_schedules import WarmupLR
from oxizero.utils import log_dist, logger
from oxizero import comm as dist

assert deepspeed.ops.adam.FusedAdam is FusedAdam
assert deepspeed.runtime.lr_schedules.WarmupLR is deepspeed.lr_schedules.WarmupLR
assert deepspeed.utils.logger is deepspeed.logger and deepspeed.comm is dist
assert deepspeed.DeepSpeedEngine is deepspeed.Engine and deepspeed.__version__[0].isdigit()
assert get_accelerator().device_name() in ("cpu", "cuda")
"""


def test_names_are_where_deepspeed_has_them():
    exec(NAMES, {})
