"""A bounded buffer that a background thread keeps full."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from distribax import jax_private

_CLOSE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_HEAD_START_SECONDS: Final = 0.001
"""How long a consumer with a full buffer has Python's lock for itself after it took an item: it is
about to start a step, and would wait for the lock while the thread makes the next item."""

_T = TypeVar("_T")


class _Buffer(Generic[_T]):
    """What the thread and the consumer share."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ready: deque[_T] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._is_closed = False

    def put(self, item: _T) -> bool:
        """Adds an item once there is room, and returns True; False when the consumer has gone.

        It returns when it is time to make the next one: at once, or after the consumer's head start
        if the buffer is full.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._size)
            if not self._is_closed:
                self._ready.append(item)
                self._changed.notify_all()
            if len(self._ready) == self._size:
                self._changed.wait_for(lambda: not self._ready, _HEAD_START_SECONDS)
            return not self._is_closed

    def end(self, error: BaseException) -> None:
        """Makes `get` raise `error` after the last item, for good."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def get(self, thread: threading.Thread) -> _T:
        """Takes the next item, waiting for it as long as `thread` can bring one."""
        with self._changed:
            while not self._changed.wait_for(self._has_answer, _LOOK_SECONDS):
                if not thread.is_alive():
                    raise RuntimeError(
                        "the input thread has ended, which happens in a forked process. Make a "
                        "new iterator there."
                    )
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            raise self._error or ValueError("this iterator was closed; make a new one.")

    def _has_answer(self) -> bool:
        return bool(self._ready) or self._error is not None or self._is_closed

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()


# Threads that are still running: a thread inside JAX when Python ends would abort the process.
_running: dict[threading.Thread, _Buffer[Any]] = {}


@atexit.register
def _end_all() -> None:
    threads = list(_running.items())
    for _, buffer in threads:
        buffer.close()
    for thread, _ in threads:
        thread.join(_CLOSE_SECONDS)


class Prefetcher(Generic[_T]):
    """Calls `produce` in a thread, ahead of `next`, and passes on what it raises.

    The thread does not know the prefetcher, so that it ends when nobody uses that any more. Grain's
    prefetch would wait for its thread without a bound, and this one may wait for other workers.

    Args:
        produce: Returns the next item, or raises StopIteration.
        size: How many items are kept ready.
        release: Called at the end of the thread.
        name: The thread's name.
    """

    def __init__(
        self, produce: Callable[[], _T], size: int, release: Callable[[], None], name: str
    ) -> None:
        buffer = _Buffer[_T](size)
        apply_settings = jax_private.copy_thread_settings()

        def fill() -> None:
            try:
                apply_settings()
                while buffer.put(produce()):
                    pass
            except BaseException as error:
                buffer.end(error)
            finally:
                release()
                _running.pop(threading.current_thread(), None)

        self._buffer = buffer
        self._thread = threading.Thread(target=fill, name=name, daemon=True)
        _running[self._thread] = buffer
        self._thread.start()

    def next(self) -> _T:
        """Returns the next item, or raises what `produce` has raised, every time from then on."""
        return self._buffer.get(self._thread)

    def close(self) -> None:
        """Ends the thread, and waits for it a while."""
        self._buffer.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def __del__(self) -> None:
        self._buffer.close()
