"""Where ranks meet before an engine is made: each says that it is ready, or why it gives up.

All that a rank does by itself in `initialize` comes before, so that a model or a configuration that
one rank refuses ends the call on all of them.
"""

import contextlib
import threading
from datetime import timedelta

from oxizero import world
from oxizero._oxizero import CommError

# For how long a rank that gives up is there to say so; its error comes at once. The others may
# import for long what it did not come to.
_STAYS = timedelta(seconds=30)


class Meeting:
    """That of the engine that was counted last."""

    def __init__(self):
        self._name = f"start {world.engines()}"
        self._is_over = world.place().size == 1

    def meet(self, back_end):
        """Returns when every rank is ready; an error if one gives up, or does not come."""
        if self._is_over:
            return
        self._is_over = True  # what fails from here on fails in the engine's own world
        gave_up = back_end.ready(self._name)
        if gave_up is not None:
            rank, why = gave_up
            raise CommError(f"rank {rank} gave up in initialize: {why}")

    def give_up(self, back_end, error):
        """This rank does not come to the meeting; those that do are told."""
        if self._is_over:
            return
        self._is_over = True
        why = f"{type(error).__name__}: {error}"

        def say():
            with contextlib.suppress(Exception):  # nobody has come to hear it
                back_end.give_up(self._name, why, _STAYS)

        threading.Thread(target=say).start()
