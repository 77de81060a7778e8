"""A map by several threads that keeps the order of the elements."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from distribax import jax_private
from distribax.data.elements import Element
from distribax.data.runtime.iterators.pipeline_iterator import PipelineIterator, Stage
from distribax.data.runtime.pass_context import IteratorState

# Handing work to another thread costs some 30 microseconds. Quick calls are handed over several
# at a time; where the choice is ours, quicker ones than this run in place.
_WORTH_A_THREAD = 200e-6
_CHUNK_SECONDS = 500e-6
_MAX_CHUNK = 64
_MEASURED_CALLS = 8


@dataclass
class _CallResults:
    """What a thread made of some elements: results up to the first error."""

    results: list[Element]
    error: Exception | None
    seconds_per_call: float


@dataclass
class _Chunk:
    """Consecutive elements under way in one thread.

    `before` is the parent's position before the element that has `skipped` predecessors there.
    """

    before: dict[str, Any]
    skipped: int
    elements: list[Element]
    future: Future[_CallResults]
    given: int = 0


def _run(call: Callable[[Any], Any], elements: list[Element]) -> _CallResults:
    start = time.perf_counter()
    results: list[Element] = []
    error: Exception | None = None
    for element in elements:
        try:
            results.append(call(element))
        except Exception as raised:
            error = raised
            break
    return _CallResults(results, error, (time.perf_counter() - start) / len(elements))


class ParallelMapIterator(Stage):
    """Runs a function on the next elements ahead of use, in `num_threads` threads.

    With `measure`, the first calls run in place and threads are used only if they are worth it.
    """

    _executor: ThreadPoolExecutor | None = None

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
        self._left_to_measure = _MEASURED_CALLS if measure else 0
        self._quickest = float("inf")
        self._chunk_size = 1
        self._chunks: deque[_Chunk] = deque()
        self._input_ended = False

    @override
    def __next__(self) -> Element:
        if self._left_to_measure:
            return self._measured_call()
        if not self._num_threads:
            return self._call(self._next())
        self._submit()
        if not self._chunks:
            self._stop()
            raise StopIteration
        chunk = self._chunks[0]
        # Waiting first: if the user interrupts it, no element is lost.
        wait([chunk.future])
        outcome = chunk.future.result()
        number = chunk.given
        chunk.given += 1
        if number < len(outcome.results):
            if chunk.given == len(chunk.elements):
                self._finish(outcome)
            return outcome.results[number]
        assert outcome.error is not None
        self._retry_rest(chunk)
        raise outcome.error

    def _measured_call(self) -> Element:
        element = self._next()
        start = time.perf_counter()
        result = self._call(element)
        # The first call often pays for imports and caches, so the quickest one counts.
        self._quickest = min(self._quickest, time.perf_counter() - start)
        self._left_to_measure -= 1
        if not self._left_to_measure and self._quickest < _WORTH_A_THREAD:
            self._num_threads = 0
        return result

    def _submit(self) -> None:
        while not self._input_ended and len(self._chunks) < 2 * self._num_threads:
            before = self._input.get_state()
            elements: list[Element] = []
            failed: Future[_CallResults] | None = None
            try:
                while len(elements) < self._chunk_size:
                    elements.append(self._next())
            except StopIteration:
                self._input_ended = True
            except Exception as error:
                failed = Future()
                failed.set_result(_CallResults([], error, 0.0))
            if elements:
                self._chunks.append(self._start_chunk(before, 0, elements))
            if failed is not None:
                # An error of the input keeps its place: first come the elements before it.
                self._chunks.append(_Chunk(before, len(elements), [None], failed))
                return

    def _start_chunk(self, before: dict[str, Any], skipped: int, elements: list[Element]) -> _Chunk:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                self._num_threads, "distribax-map", jax_private.copy_thread_settings()
            )
        return _Chunk(before, skipped, elements, self._executor.submit(_run, self._call, elements))

    def _finish(self, outcome: _CallResults) -> None:
        self._chunks.popleft()
        fitting = int(_CHUNK_SECONDS / max(outcome.seconds_per_call, 1e-9))
        self._chunk_size = min(max(fitting, 1), _MAX_CHUNK)

    def _retry_rest(self, chunk: _Chunk) -> None:
        # After an error the caller may go on with the next element.
        self._chunks.popleft()
        rest = chunk.elements[chunk.given :]
        if rest:
            skipped = chunk.skipped + chunk.given
            self._chunks.appendleft(self._start_chunk(chunk.before, skipped, rest))

    @override
    def _stop(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)

    @override
    def get_state(self) -> IteratorState:
        if not self._chunks:
            return IteratorState(parent=self._input.get_state(), skip=0)
        chunk = self._chunks[0]
        return IteratorState(parent=chunk.before, skip=chunk.skipped + chunk.given)

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._stop()
        self._chunks.clear()
        self._input_ended = False
        self._input.set_state(state["parent"])
        for _ in range(state["skip"]):
            self._next()
