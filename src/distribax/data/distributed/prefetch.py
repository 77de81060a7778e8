"""A bounded buffer that a background thread keeps full."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from distribax.data.distributed.priority import Background

_CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 1.0
# A consumer that has just taken an item starts its step with it; the thread lets it go first.
_STEP_ASIDE_SECONDS = 0.0005
# So many full buffers in a row show that there is time to spare.
_AHEAD = 4
# A thread that did not get to run for so long within one item, or so many empty buffers in a row,
# show that there is none. A consumer may well run 32 steps ahead of its devices.
_STARVED_SECONDS = 0.03
_BEHIND = 64


class _Buffer:
    """What the thread and the consumer share; it outlives neither."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ready: deque[tuple[Any, BaseException | None]] = deque()
        self.changed = threading.Condition()
        self.closed = False
        # How many times in a row the thread has found it full, and the consumer empty.
        self.num_full = 0
        self.num_empty = 0

    def put(self, item: Any, error: BaseException | None = None) -> bool:
        """Adds an item once there is room; False when the consumer has gone."""
        with self.changed:
            was_full = len(self.ready) >= self.size
            self.num_full = self.num_full + 1 if was_full else 0
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
            self.num_empty = 0 if self.ready else self.num_empty + 1
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
        self._producer = _Producer(produce, self._buffer, release, name)

    def next(self) -> Any:
        """Returns the next item, or raises what `produce` has raised."""
        if self._error is not None:
            raise self._error
        item, error = self._buffer.get(self._producer.is_alive)
        if error is not None:
            # The end, or a failure, is final: asking again must not wait for a thread that ended.
            self._error = error
            raise error
        self._producer.relieve()
        return item

    def close(self) -> None:
        """Ends the thread, and waits until it has ended."""
        self._buffer.close()
        self._producer.join(_CLOSE_SECONDS)

    def __del__(self) -> None:
        self._buffer.close()


class _Producer:
    """The thread that fills a buffer.

    What it uses of the processor it takes from the step that it makes batches for, if that keeps
    all cores busy. So once it is well ahead it steps back behind all other threads, and works
    where they leave a gap. Where gaps are too few, as other programs keep the cores busy as well, a
    new thread takes its place: it has the priority of the consumer, who starts it.
    """

    def __init__(
        self, produce: Callable[[], Any], buffer: _Buffer, release: Callable[[], None], name: str
    ) -> None:
        self._produce = produce
        self._buffer = buffer
        self._release = release
        self._name = name
        self._in_background = False
        self._is_late = False
        self._start(None)

    def _start(self, before: threading.Thread | None) -> None:
        self._thread = threading.Thread(
            target=self._work, args=(before,), name=self._name, daemon=True
        )
        _running[self._thread] = self._buffer
        self._thread.start()

    def relieve(self) -> None:
        """Starts another thread if this one comes too late."""
        if not self._is_late:
            return
        with self._buffer.changed:
            if self._is_late:
                self._is_late = self._in_background = False
                self._start(self._thread)

    def is_alive(self) -> bool:
        """Tells whether there is a thread that may bring something."""
        return self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Waits until the thread has ended, unless it is this one."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _work(self, before: threading.Thread | None) -> None:
        own = threading.current_thread()
        try:
            if before is not None:
                before.join()
            while self._thread is own and self._advance():
                pass
        finally:
            with self._buffer.changed:
                self._is_late = False
                is_last = self._thread is own
            if is_last:
                self._release()
            _running.pop(own, None)

    def _advance(self) -> bool:
        """Makes the next item; False if it was the last one."""
        buffer = self._buffer
        if buffer.closed:
            return False
        starved = -_starved_seconds()
        try:
            item = self._produce()
        except BaseException as error:
            buffer.put(None, error)
            return False
        starved += _starved_seconds()
        if not buffer.put(item):
            return False
        if self._thread is not threading.current_thread():
            return True  # Another one has taken its place.
        if not self._in_background:
            if buffer.num_full >= _AHEAD:
                buffer.num_full = 0
                self._in_background = _background.enter()
        elif starved > _STARVED_SECONDS or buffer.num_empty > _BEHIND:
            _background.note_starvation()
            self._is_late = True
        return True


_background = Background()


def _starved_seconds() -> float:
    """Returns a clock of the time in which this thread did not run."""
    return time.monotonic() - time.thread_time()
