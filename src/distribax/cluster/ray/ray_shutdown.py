"""The end of a connection to Ray, within a bound: Ray itself waits for its processes for ever."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Final

from typing_extensions import override

from distribax.cluster.environment_variables import read_seconds
from distribax.cluster.ray.cluster_token import import_ray
from distribax.cluster.ray.left_sockets import close_left

_logger = logging.getLogger(__name__)

_SECONDS: Final = read_seconds("DISTRIBAX_RAY_SHUTDOWN_SECONDS", 30.0)
"""How long Ray may take to shut down: before its processes here are killed, and once more after."""

_prepared: _ShutdownThread | None = None
_failure: str | None = None
"""Why Ray could not be shut down in this process, if so: then it cannot be started again."""


class _ShutdownThread(threading.Thread):
    """Shuts Ray down when it is told to. No thread can be started while the program ends."""

    def __init__(self) -> None:
        super().__init__(name="distribax-ray-shutdown", daemon=True)
        self._is_wanted = threading.Event()

    @override
    def run(self) -> None:
        self._is_wanted.wait()
        try:
            close_left()
        finally:
            import_ray().shutdown()

    def shut_down(self, seconds: float) -> bool:
        """Shuts Ray down; returns whether it has in that time."""
        self._is_wanted.set()
        self.join(seconds)
        return not self.is_alive()


def prepare_shutdown() -> None:
    """Prepares for `shut_down_ray`; called before Ray is connected.

    Raises:
        RuntimeError: Ray could not be shut down in this process.
    """
    global _prepared
    if _failure is not None:
        raise RuntimeError(f"{_failure} It can only be used again by another process.")
    if _prepared is None:
        _prepared = _ShutdownThread()
        _prepared.start()


def shut_down_ray(describe: Callable[[], str], kill: Callable[[], None] | None) -> None:
    """Ends this process's connection to Ray. If that is impossible, an error is logged.

    Args:
        describe: Returns which of Ray's processes are missing.
        kill: Ends Ray's processes; None if they are not this program's.
    """
    global _prepared, _failure
    if _failure is not None:
        return
    thread, _prepared = _prepared, None
    if thread is None or thread.shut_down(_SECONDS):
        return
    missing = describe()
    if kill is not None:
        _logger.warning(
            "Ray has not shut down within %g s: %s. Its processes are killed.", _SECONDS, missing
        )
        kill()
        if thread.shut_down(_SECONDS):
            return
    _failure = f"Ray could not be shut down in this process: {missing}."
    _logger.error("%s The program goes on without.", _failure)
    # It would wait for ever when the program ends.
    atexit.unregister(import_ray()._private.worker.shutdown)
