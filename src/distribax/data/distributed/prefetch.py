"""A bounded buffer that a background thread keeps full."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 1.0
# A consumer that has just taken an item starts its step with it; the thread lets it go first.
_STEP_ASIDE_SECONDS = 0.0005


class _Buffer:
    """What the thread and the consumer share; it outlives neither."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ready: deque[tuple[Any, BaseException | None]] = deque()
        self.changed = threading.Condition()
        self.closed = False

    def put(self, item: Any, error: BaseException | None = None) -> bool:
        """Adds an item once there is room; False when the consumer has gone."""
        with self.changed:
            was_full = len(self.ready) >= self.size
            while len(self.ready) >= self.size and not self.closed:
                self.changed.wait()
            if self.closed:
                return False
            self.ready.append((item, error))
            self.changed.notify_all()
        if was_full:
            # There is time: the consumer is the slower of the two.
            time.sleep(_STEP_ASIDE_SECONDS)
        return True

    def get(self, is_alive: Callable[[], bool]) -> tuple[Any, BaseException | None]:
        """Takes the next item, as long as there is a thread that can still bring one."""
        with self.changed:
            while not self.ready and not self.closed:
                if not self.changed.wait(_LOOK_SECONDS) and not is_alive() and not self.ready:
                    return None, RuntimeError("the input thread has ended without a word.")
            if not self.ready:
                return None, ValueError("this iterator was closed; make a new one.")
            item = self.ready.popleft()
            self.changed.notify_all()
            return item

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.ready.clear()
            self.changed.notify_all()


# Threads that are still running: a thread inside JAX when Python ends would abort the process.
_running: dict[threading.Thread, _Buffer] = {}


@atexit.register
def _end_all() -> None:
    threads = list(_running.items())
    for _, buffer in threads:
        buffer.close()
    for thread, _ in threads:
        thread.join(_CLOSE_SECONDS)


class Prefetcher:
    """Calls `produce` in a thread, ahead of `next`, and passes on what it raises.

    The thread knows only the buffer and `produce`, so that dropping the prefetcher ends it.
    """

    def __init__(
        self, produce: Callable[[], Any], size: int, release: Callable[[], None], name: str
    ) -> None:
        self._buffer = _Buffer(size)
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=_work, args=(produce, self._buffer, release), name=name, daemon=True
        )
        _running[self._thread] = self._buffer
        self._thread.start()

    def next(self) -> Any:
        """Returns the next item, or raises what `produce` has raised."""
        if self._error is not None:
            raise self._error
        item, error = self._buffer.get(self._thread.is_alive)
        if error is not None:
            # The end, or a failure, is final: asking again must not wait for a thread that ended.
            self._error = error
            raise error
        return item

    def close(self) -> None:
        """Ends the thread, and waits until it has ended."""
        self._buffer.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def __del__(self) -> None:
        self._buffer.close()


def _work(produce: Callable[[], Any], buffer: _Buffer, release: Callable[[], None]) -> None:
    try:
        while True:
            try:
                item = produce()
            except BaseException as error:
                buffer.put(None, error)
                return
            if not buffer.put(item):
                return
    finally:
        release()
        _running.pop(threading.current_thread(), None)
