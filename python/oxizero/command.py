"""The command `oxizero`: starts ranks of a script."""

import signal
import sys

from oxizero import _oxizero


def main():
    """Runs the command; ends the process with its exit code."""
    # The command has handlers of its own; Python's would show a traceback after them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_oxizero.command(sys.argv[1:], sys.executable))


if __name__ == "__main__":
    main()
