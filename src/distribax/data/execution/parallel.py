"""A map by several threads that keeps the order of the elements."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from distribax.data.elements import Element
from distribax.data.execution.stage import PipelineIterator, Stage

# A call handed to another thread costs some 30 microseconds; quicker functions run in place.
_WORTH_A_THREAD = 200e-6
_MEASURED_CALLS = 8


class ParallelMapIterator(Stage):
    """Runs a function on the next elements ahead of use, in `num_threads` threads.

    With `measure`, the first calls run in place and threads are used only if they are worth it.
    """

    def __init__(
        self,
        parent: PipelineIterator,
        call: Callable[[Any], Any],
        num_threads: int,
        measure: bool,
    ) -> None:
        super().__init__(parent)
        self._call = call
        self._num_threads = num_threads
        self._measure = _MEASURED_CALLS if measure else 0
        self._measured = 0.0
        # Each element under way, with the parent's position before it.
        self._pending: deque[tuple[Any, Future[Element]]] = deque()
        self._input_ended = False
        self._executor: ThreadPoolExecutor | None = None

    def __next__(self) -> Element:
        if self._measure:
            return self._measured_call()
        if not self._num_threads:
            return self._call(self._next())
        self._submit()
        if not self._pending:
            self._stop_threads()
            raise StopIteration
        _, future = self._pending[0]
        # A wait that the user interrupts must not lose the element; a failed call must.
        wait([future])
        self._pending.popleft()
        return future.result()

    def _measured_call(self) -> Element:
        element = self._next()
        start = time.perf_counter()
        result = self._call(element)
        # The first call often pays for imports and caches, so the quickest one counts.
        spent = time.perf_counter() - start
        self._measured = min(self._measured or spent, spent)
        self._measure -= 1
        if not self._measure and self._measured < _WORTH_A_THREAD:
            self._num_threads = 0
        return result

    def _submit(self) -> None:
        while not self._input_ended and len(self._pending) < 2 * self._num_threads:
            before = self._parent.get_state()
            try:
                element = self._next()
            except StopIteration:
                self._input_ended = True
                return
            if self._executor is None:
                self._executor = ThreadPoolExecutor(
                    self._num_threads, thread_name_prefix="distribax-map"
                )
            self._pending.append((before, self._executor.submit(self._call, element)))

    def _stop_threads(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)

    def get_state(self) -> dict[str, Any]:
        return self._pending[0][0] if self._pending else self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._stop_threads()
        self._pending.clear()
        self._input_ended = False
        self._parent.set_state(state)

    def close(self) -> None:
        """Ends the threads."""
        if hasattr(self, "_executor"):
            self._stop_threads()
            self._pending.clear()
        super().close()
