"""The examples train."""

from pathlib import Path

from running import TORCHRUN, succeed

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_model_of_transformers_trains_under_torchrun():
    script = EXAMPLES / "train_transformers.py"
    written = succeed([*TORCHRUN, "--standalone", "--nproc-per-node", 2, script, "--steps", 10])
    first, last = written.splitlines()
    assert first.startswith("step 1: loss 5.")
    assert last.startswith("step 10: loss 3.")
