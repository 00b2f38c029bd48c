"""Ranks that torchrun has started again meet as if there had been none before."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
import sys

import torch
import oxizero

back_end, how = sys.argv[1:]
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
fails = is_first and os.environ["RANK"] == "1"
oxizero.init_distributed()
assert torch.distributed.get_rank() == int(os.environ["RANK"])
config = {
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "zero_optimization": {"stage": 2},
    "oxizero": {"backend": back_end},
}
if fails and how == "refused":
    config["nonsense"] = 1
engine, *_ = oxizero.initialize(model=torch.nn.Linear(2, 1), config=config)
if fails:
    os._exit(3)
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
print("updated", flush=True)
"""


@pytest.mark.parametrize("back_end", ["native", "torch"])
@pytest.mark.parametrize("how", ["refused", "killed"])
def test_ranks_are_started_again(tmp_path, back_end, how):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"),
            *("--nproc-per-node=2", "--monitor-interval=0.1", "train.py", back_end, how),
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("updated") == 2, run.stderr
