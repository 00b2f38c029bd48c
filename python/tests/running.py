"""Runs scripts as their users do."""

import os
import subprocess
import sys

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OXIZERO = [sys.executable, "-c", "import oxizero_command; oxizero_command.main()"]


def run(command, cwd=None):
    """Runs a command with one thread a rank; returns how it ended and what it wrote."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # Whole paths, for the command may run in another folder.
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(f) for f in folders if f)
    # A launcher's ranks do not take part in a world around them.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def succeed(command, cwd=None):
    """Runs a command that must succeed; returns what it wrote to standard output."""
    ended = run(command, cwd)
    assert ended.returncode == 0, f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
