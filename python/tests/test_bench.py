"""The benchmarks run, small, and tell what they measured."""

import json
import sys
from pathlib import Path

from running import succeed

BENCH = Path(__file__).parents[2] / "bench"
FIELDS = {"name", "ranks", "median", "unit", "reference", "ratio"}


def measured(script, *words, folder):
    """The rows of a bench, by name."""
    results = folder / "rows.jsonl"
    written = succeed([sys.executable, BENCH / script, *words, "--rounds", 1, "--json", results])
    assert "| engine |" in written
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert all(row.keys() == FIELDS and row["median"] > 0 for row in rows)
    return {row["name"]: row for row in rows}


def test_a_training_step_is_measured_beside_its_peers(tmp_path):
    size = ["--layers", 2, "--width", 64, "--steps", 2, "--warm", 1]
    names = ["--engines", "single,ddp,oxizero 2,absent"]
    rows = measured("train.py", *size, *names, folder=tmp_path)
    engines = ["single", "ddp", "oxizero-2"]
    assert list(rows) == [f"train/mlp/{e}/{w}" for e in engines for w in ("step", "peak")]
    assert rows["train/mlp/ddp/step"]["ratio"] == 1.0
    assert rows["train/mlp/single/step"]["ranks"] == 1
    assert rows["train/mlp/oxizero-2/peak"]["reference"] == "plan"


def test_reading_gradients_is_measured_beside_a_loop(tmp_path):
    size = ["--numel", 1000, "--tensors", 10, "--reads", 1, "--engines", "oxizero 2"]
    rows = measured("gradients.py", *size, folder=tmp_path)
    assert list(rows) == [f"gradients/10/oxizero-2/{what}" for what in ("loop", "model_grads")]
    assert rows["gradients/10/oxizero-2/loop"]["ratio"] == 1.0


def built():
    """Whether cargo has built the command that some benches run."""
    sys.path.insert(0, str(BENCH))
    try:
        import command
    finally:
        sys.path.remove(str(BENCH))
    return command.path().exists()


def test_collectives_are_measured_beside_gloos(tmp_path):
    rows = measured("collectives.py", "--sizes", "64KiB", folder=tmp_path)
    engines = ["gloo", *(["oxizero"] if built() else [])]
    done = ["reduce_scatter/f32", "reduce_scatter/bf16", "all_reduce/f32", "all_gather/f32"]
    assert list(rows) == [f"{e}/{what}/64KiB" for e in engines for what in ["memcpy", *done]]
    assert rows["gloo/memcpy/64KiB"]["ratio"] == 1.0


def test_updates_are_measured_beside_their_peers(tmp_path):
    rows = measured("optimizer.py", "--numel", 300_000, "--steps", 1, folder=tmp_path)
    names = [name.split("/")[1] for name in rows if "deepspeed" not in name]
    assert names == ["torch-fused", *(["oxizero-f32", "oxizero-bf16"] if built() else [])]


def test_what_hooks_cost_is_measured_above_forward_and_backward(tmp_path):
    size = ["--params", 50, "--numel", 4, "--steps", 3, "--ranks", 1, "--engines", "oxizero 2"]
    rows = measured("overhead.py", *size, folder=tmp_path)
    names = ["compute/total", "oxizero-2/total", "oxizero-2/added"]
    assert list(rows) == [f"overhead/{name}" for name in names]
