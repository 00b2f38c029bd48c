"""The command `oxizero`, which starts ranks of a script, and takes over DeepSpeed's checkpoints.

A package of its own: whatever imports `oxizero` imports torch, which takes longer than to start
the ranks.
"""

import argparse
import signal
import sys
from importlib import machinery, util


def main():
    """Runs the command; ends the process with its exit code."""
    if sys.argv[1:2] == ["convert"]:
        sys.exit(_convert(sys.argv[2:]))
    # The command has handlers of its own; Python's would show a traceback after them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native().command(sys.argv[1:], sys.executable))


def _convert(words):
    """`oxizero convert`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="oxizero convert",
        description="Makes a checkpoint that load_checkpoint takes of one that DeepSpeed wrote, "
        "of ZeRO stage 1, 2 or 3.",
        epilog="A run's weights as safetensors files: `convert RUN --to safetensors OUT` of the "
        "`oxizero` that cargo builds.",
    )
    parser.add_argument("--from", dest="source", choices=["deepspeed"], required=True)
    parser.add_argument("folder", help="what save_checkpoint was given, or a checkpoint in it")
    parser.add_argument("out", help="what load_checkpoint is to be given")
    parser.add_argument("--tag", help="which checkpoint; the latest if absent")
    given = parser.parse_args(words)
    from oxizero import convert_deepspeed  # here, for it imports torch

    tag = [] if given.tag is None else [f"--tag={given.tag}"]
    return convert_deepspeed.main([*tag, "--", given.folder, given.out])


def _native():
    """The extension module of `oxizero`, loaded without its package."""
    package = util.find_spec("oxizero").submodule_search_locations
    spec = machinery.PathFinder.find_spec("_oxizero", package)
    native = util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native
