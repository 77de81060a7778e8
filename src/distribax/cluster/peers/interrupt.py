"""Calling the main thread back from a wait in JAX.

A transfer that another worker has begun and not ended is never given up by Gloo, so that who waits
for its result would wait for ever. But JAX looks now and then, while it waits in the main thread,
whether a signal has arrived, as it wants to be stopped by Ctrl-C. A signal handler that raises an
exception ends the wait.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Final

# Python handles the "signal" when it is told to; it is never sent, so that nothing else sees it.
SIGNAL: Final = getattr(signal, "SIGRTMAX", signal.SIGURG)


class Interrupt:
    """Ends waits of the main thread with an exception.

    Made in the main thread; elsewhere, or where the signal is in use, it does nothing.
    """

    def __init__(self) -> None:
        self._main = _thread.get_ident()
        self._since: float | None = None
        self._make_error: Callable[[], Exception] | None = None
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(SIGNAL) is signal.SIG_DFL:
            signal.signal(SIGNAL, self._raise)

    def wait(self, wait: Callable[[Any], Any], argument: Any) -> Any:
        """Calls `wait`, which other threads may end meanwhile."""
        if _thread.get_ident() != self._main:
            return wait(argument)
        try:
            self._since = time.monotonic()
            return wait(argument)
        finally:
            self._since = None

    def end_waits(self, seconds: float, make_error: Callable[[], Exception]) -> None:
        """Raises an exception in the main thread if it has waited longer than that."""
        since = self._since
        if since is not None and time.monotonic() - since > seconds:
            self._make_error = make_error
            _thread.interrupt_main(SIGNAL)

    def _raise(self, *_: Any) -> None:
        # Runs in the main thread, which may be elsewhere by now.
        if self._since is not None and self._make_error is not None:
            raise self._make_error()
