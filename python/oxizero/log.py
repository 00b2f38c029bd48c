"""What the package says: DeepSpeed's `logger` and `log_dist`."""

import logging
import sys

from oxizero import world

logger = logging.getLogger("oxizero")
logger.setLevel(logging.INFO)
logger.propagate = False


class _Stdout(logging.StreamHandler):
    """Writes to what standard output is when it writes."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stdout


_handler = _Stdout()
_handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
logger.addHandler(_handler)


def log_dist(message, ranks=None, level=logging.INFO):
    """Logs on these ranks: a list of them, or all where there is none or it has a -1."""
    rank = world.place().rank
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %s] %s", rank, message)
