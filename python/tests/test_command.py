"""The command `oxizero`, as the package installs it."""

import json
import sys
from importlib import metadata

from running import OXIZERO, run, succeed

SCRIPT = """
import json, os, sys
rank = int(os.environ["RANK"])
told = [rank, os.environ["WORLD_SIZE"], sys.executable, sys.argv[1:]]
print(json.dumps(told), flush=True)
if "--fail" in sys.argv and rank == 1:
    raise SystemExit("it is too late")
"""


def test_ranks_run_with_the_interpreter_that_the_package_is_installed_for(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    written = succeed([*OXIZERO, "launch", "-n", 2, script, "--lr", "1"])
    told = sorted(json.loads(line) for line in written.splitlines())
    assert told == [[rank, "2", sys.executable, ["--lr", "1"]] for rank in range(2)]


def test_the_first_rank_that_fails_is_named_with_what_it_said(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = run([*OXIZERO, "launch", "-n", 2, script, "--fail"])
    assert ended.returncode == 1
    assert ended.stderr.endswith(
        "error: rank 1 failed first: it ended with exit code 1; its last lines on standard error:"
        "\n  | it is too late\n"
    )


def test_the_command_says_what_it_has():
    assert "oxizero launch -n <N> <SCRIPT.py>" in succeed([*OXIZERO, "--help"])
    assert succeed([*OXIZERO, "--version"]).startswith("oxizero 0.")
    ended = run([*OXIZERO, "train"])
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: `train` is no command of this package")


def test_the_installed_package_has_the_command():
    try:
        package = metadata.distribution("oxizero")
    except metadata.PackageNotFoundError:
        return  # run from the sources
    commands = {entry.name: entry.value for entry in package.entry_points}
    assert commands == {"oxizero": "oxizero_command:main"}
