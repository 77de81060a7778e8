"""The processor time of threads that can wait."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Final

_LOWEST: Final = 19
_FIRST_PAUSE_SECONDS: Final = 60.0


class Background:
    """Lets threads step back behind all others, unless the machine has shown to be too busy."""

    def __init__(self) -> None:
        self._pause = _FIRST_PAUSE_SECONDS
        self._busy_until = float("-inf")

    def enter(self) -> bool:
        """Gives this thread the lowest priority for good; False if it keeps the one it has.

        A thread cannot raise its priority again without special rights.
        """
        # Elsewhere the priority is the whole process'.
        if sys.platform != "linux" or time.monotonic() < self._busy_until:
            return False
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        except OSError:  # Some sandboxes do not allow it.
            return False
        return True

    def note_starvation(self) -> None:
        """Takes in that a thread did not get to run: for a while, each time longer, none enters."""
        self._busy_until = time.monotonic() + self._pause
        self._pause *= 2
