"""The wheel is built by maturin and installs in a fresh virtual environment."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[1]
# Set where the package was built already, by scripts/python-set-up.sh: else all would be built.
BUILT = "CARGO_TARGET_DIR" in os.environ and importlib.util.find_spec("maturin") is not None

SCRIPT = """
import os, oxizero, torch
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
config["gradient_clipping"] = 0.0
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = oxizero.initialize(model=model, optimizer=optimizer, config=config)
engine.backward(engine(torch.ones(2)).sum())
engine.step()
print(oxizero.__file__, engine.world_size, engine.global_steps)
"""


@pytest.mark.skipif(not BUILT, reason="CARGO_TARGET_DIR is not set, or there is no maturin")
def test_the_wheel_installs_in_a_fresh_environment(tmp_path):
    def run(*command, cwd=tmp_path):
        ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    run(sys.executable, "-m", "maturin", "build", "--out", tmp_path, cwd=PACKAGE)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-abi3-" in wheel.name
    fresh = tmp_path / "fresh"
    run(sys.executable, "-m", "venv", fresh)
    run(fresh / "bin/python", "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    # torch is 2.7 GB: this environment's is used.
    (packages,) = (fresh / "lib").glob("python3*/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    (tmp_path / "train.py").write_text(SCRIPT)
    command = shutil.which("oxizero", path=fresh / "bin")
    written = run(command, "launch", "-n", "2", "train.py")
    assert written == f"{packages / 'oxizero/__init__.py'} 2 1\n" * 2
