"""Ways to learn that a machine is about to be taken away, besides SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
import urllib.request
from typing import Any, Final

_METADATA_HOST: Final = "metadata.google.internal"
_REQUEST_SECONDS: Final = 1.0
_NOTICES: Final = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
"""The entries of Compute Engine's metadata server that announce the end, and what they say then."""


class GCETerminationWatcher:
    """Asks Compute Engine's metadata server whether this machine is about to be taken away.

    Pass it to `dx.TerminationConfig` as `termination_watcher_fn`. The variable GCE_METADATA_HOST
    names another server.

    Args:
        interval_seconds: How long to wait at least between two questions.

    Raises:
        ValueError: The time is negative.
    """

    def __init__(self, interval_seconds: float = 5.0) -> None:
        if interval_seconds < 0:
            raise ValueError(
                f"GCETerminationWatcher: interval_seconds={interval_seconds} is negative. Expected "
                "seconds."
            )
        self._interval = interval_seconds
        self._asked = float("-inf")

    def __call__(self) -> bool:
        """Returns whether the machine is about to be taken away; False if nobody answers."""
        now = time.monotonic()
        if now - self._asked < self._interval:
            return False
        self._asked = now
        return any(_ask(name) == expected for name, expected in _NOTICES.items())


class SignalTerminationWatcher:
    """Listens to a signal that announces the end, such as that of Slurm's `--signal=USR1@120`.

    Pass it to `dx.TerminationConfig` as `termination_watcher_fn`. Create it in the main thread.

    Args:
        number: The signal, for example `signal.SIGUSR1`.

    Raises:
        RuntimeError: It is created outside the main thread.
    """

    def __init__(self, number: signal.Signals = signal.SIGUSR1) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "SignalTerminationWatcher: made in another thread than the main one, where Python "
                "cannot listen to signals. Make it in the main thread."
            )
        self._told = False
        self._number = number
        self._previous: Any = signal.signal(number, self._hear) or signal.SIG_DFL

    def __call__(self) -> bool:
        """Returns whether the signal has come since this was last asked."""
        told, self._told = self._told, False
        return told

    def close(self) -> None:
        """Stops listening; what listened before does so again."""
        signal.signal(self._number, self._previous)

    def _hear(self, *_: object) -> None:
        self._told = True


def _ask(name: str) -> str:
    host = os.environ.get("GCE_METADATA_HOST", _METADATA_HOST)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{name}", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as answer:
            said: str = answer.read(100).decode(errors="replace").strip()
    except (OSError, ValueError):
        return ""
    return said
