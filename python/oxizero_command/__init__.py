"""The command `oxizero`, which starts ranks of a script.

A package of its own: whatever imports `oxizero` imports torch, which takes longer than to start
the ranks.
"""

import signal
import sys
from importlib import machinery, util


def main():
    """Runs the command; ends the process with its exit code."""
    # The command has handlers of its own; Python's would show a traceback after them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native().command(sys.argv[1:], sys.executable))


def _native():
    """The extension module of `oxizero`, loaded without its package."""
    package = util.find_spec("oxizero").submodule_search_locations
    spec = machinery.PathFinder.find_spec("_oxizero", package)
    native = util.module_from_spec(spec)
    spec.loader.exec_module(native)
    return native
