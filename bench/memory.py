"""A process's memory, in bytes; Linux.

Counted is what the process has of its own, and its share of what processes have in common: a page
of shared memory that two map is half a page to each. The code of libraries is not counted.
"""

import contextlib
import threading
from pathlib import Path

_MAPS = Path("/proc/self/smaps_rollup")
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")
# Between looks, in seconds: what is there for less may be missed.
_INTERVAL = 0.005


def resident():
    """What it has now."""
    lines = (line.split() for line in _MAPS.read_text().splitlines())
    return sum(int(words[1]) << 10 for words in lines if words[0] in _COUNTED)


@contextlib.contextmanager
def watched():
    """Looks at it again and again; gives a function that returns the most there was."""
    most, done = [resident()], threading.Event()

    def look():
        while not done.wait(_INTERVAL):
            most.append(max(most.pop(), resident()))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        done.set()
        watcher.join()
