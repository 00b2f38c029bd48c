"""What the README shows of the package does what it says."""

import os
import re
from pathlib import Path

import pytest
import torch
from models import Gpt, build
from running import OXIZERO, TORCHRUN, succeed

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "python/examples/ds_config.json"


def blocks(language):
    """The section's blocks of code in a language."""
    _, _, rest = (ROOT / "README.md").read_text().partition("\n## PyTorch\n")
    section, _, _ = rest.partition("\n## ")
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def shell_lines():
    lines = "".join(blocks("sh")).splitlines()
    commands = [line.partition("#")[0].strip() for line in lines]
    return [command for command in commands if command]


def quick_start(rank, folder):
    os.chdir(folder)
    draw = torch.Generator().manual_seed(rank)
    model = build(Gpt)
    before = [param.detach().clone() for param in model.parameters()]
    scope = {"model": model, "data": [Gpt.batch(draw) for _ in range(4)]}
    exec(blocks("python")[0], scope)
    assert scope["engine"].global_steps == 2
    return [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]


def test_the_quick_start_trains_every_parameter(ranks, tmp_path):
    (tmp_path / "ds_config.json").write_bytes(CONFIG.read_bytes())
    changed = ranks(2, quick_start, tmp_path)
    assert all(changed[0]) and changed[0] == changed[1]


@pytest.mark.parametrize("line", shell_lines())
def test_a_command_that_is_shown_runs(line):
    program, *arguments = line.split()
    if program.startswith("scripts/"):
        # They set up an environment and run in it what other tests run.
        assert os.access(ROOT / program, os.X_OK) and not arguments
        return
    if program == "pip":
        # So this package was installed, if it was.
        assert arguments == ["install", "./python"] and (ROOT / "python/pyproject.toml").exists()
        return
    launchers = {"oxizero": OXIZERO, "torchrun": TORCHRUN}
    succeed([*launchers[program], *arguments], cwd=ROOT)
