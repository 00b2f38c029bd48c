"""The command `oxizero` that cargo built here, for what it benches itself."""

import json
import os
import subprocess
from pathlib import Path

from ranks import Failed

_ROOT = Path(__file__).parents[1]


def path():
    """Where it is, if it was built."""
    return Path(os.environ.get("CARGO_TARGET_DIR", _ROOT / "target")) / "release" / "oxizero"


def bench(*words, rounds=1):
    """The rows of a bench, by name."""
    if not path().exists():
        raise Failed(f"there is no {path()}; cargo build --release -p oxizero-cli")
    command = [path(), "bench", *words, "--rounds", rounds, "--json"]
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if ended.returncode:
        raise Failed(ended.stderr)
    rows = map(json.loads, ended.stdout.splitlines())
    return {row["name"]: row for row in rows}
