"""The closures that wait for a worker, and the count of all that were scheduled."""

from __future__ import annotations

import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from distribax.coordinator.outcomes import ClosureFailure
from distribax.coordinator.references import Definition, WorkerReference
from distribax.coordinator.remote_value import RemoteValue
from distribax.coordinator.status import ClosureCounts
from distribax.errors import ClosureCancelledError

MAX_BYTES: Final = 1 << 30
"""How many bytes of arguments may wait; a closure with more waits only alone."""
_CANCELLED: Final = "the function was cancelled{}: {}"
_BEAT_SECONDS: Final = 0.25
"""How often a thread that waits for closures does something else."""


class ClosureState(enum.Enum):
    """How far a closure is."""

    BLOCKED = "blocked"
    """It waits for a remote value that it uses."""
    QUEUED = "queued"
    """It waits for a worker."""
    RUNNING = "running"
    """A worker has been given it; if the worker is lost, it is queued again."""
    FINISHED = "finished"
    """It has returned a value."""
    FAILED = "failed"
    """It has raised an exception, or a value that it needs has."""
    CANCELLED = "cancelled"
    """It was given up, because another closure had failed before it had ended."""


@dataclass(slots=True, eq=False)
class Closure:
    """A function and its arguments, to be run at least once.

    Attributes:
        function: What workers know the function as.
        arguments: The pickled arguments, or None if there are none.
        needs: The references in its arguments; those in its function belong to the function.
        value: The result, now or later.
        state: How far it is; the queue changes it.
        losses: How many workers were lost while it may have been running.
    """

    function: Definition
    arguments: bytes | None
    needs: tuple[WorkerReference, ...]
    value: RemoteValue
    state: ClosureState = ClosureState.QUEUED
    losses: int = 0


class ClosureQueue:
    """A bounded queue of closures between the user's threads and the dispatcher's.

    After a failure nothing more is given out, and what waits or runs is cancelled: its values are
    errors from then on, whatever it still returns. As soon as nothing runs any more, the next call
    of `put`, `join` or `done` raises the error; then the queue works as before.

    Args:
        size: How many closures may wait; `put` waits when it is full.
        wake: Called when there is a closure for a dispatcher that has found none.
        beat: Called now and then in threads that wait for closures.
    """

    def __init__(
        self,
        size: int,
        wake: Callable[[], None] = lambda: None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._size = size
        self._wake = wake
        self._beat = beat
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[Closure] = deque()
        self._ready_bytes = 0
        # By the id of the value that they wait for.
        self._blocked: dict[int, list[Closure]] = {}
        self._running: set[Closure] = set()
        self._counts = dict.fromkeys(ClosureState, 0)
        self._num_retried = 0
        # Whether the dispatcher has found nothing, and is to be woken.
        self._is_hungry = False
        self._error: BaseException | None = None
        # Why there are no more answers, once the dispatcher has ended.
        self._end_reason: str | None = None

    # The user's side.

    def put(self, closure: Closure) -> None:
        """Adds a closure; waits while the queue is full, and raises the error of an earlier one."""
        with self._changed:
            if self._error is not None or self._end_reason is not None:
                self._raise_error()
            if self._is_full():
                self._wait(lambda: not self._is_full() or self._is_stopped())
                self._raise_error()
            self._counts[ClosureState.QUEUED] += 1
            self._admit(closure)
            is_hungry, self._is_hungry = self._is_hungry, False
        if is_hungry:
            self._wake()

    def join(self) -> None:
        """Waits until nothing waits or runs; raises the error of a closure if there is one."""
        with self._changed:
            self._wait(lambda: self._is_idle() or self._is_stopped())
            self._raise_error()

    def done(self) -> bool:
        """Tells whether nothing waits or runs; raises the error of a closure if there is one."""
        with self._changed:
            self._raise_error()
            is_idle = self._is_idle()
        if not is_idle:
            self._beat()
        return is_idle

    def wait_for(self, value: RemoteValue) -> None:
        """Waits until a value is settled: with a result, or with an error."""
        with self._changed:
            self._wait(lambda: value.is_settled or self._end_reason is not None)
            if not value.is_settled:
                assert self._end_reason is not None
                value.set_error(ClosureCancelledError(_CANCELLED.format("", self._end_reason)))

    def count(self) -> ClosureCounts:
        """Returns how many closures are in each state."""
        with self._changed:
            counts = self._counts
            return ClosureCounts(
                scheduled=sum(counts.values()),
                finished=counts[ClosureState.FINISHED],
                failed=counts[ClosureState.FAILED],
                cancelled=counts[ClosureState.CANCELLED],
                retried=self._num_retried,
                queued=counts[ClosureState.QUEUED] + counts[ClosureState.BLOCKED],
                running=counts[ClosureState.RUNNING],
            )

    # The dispatcher's side.

    @property
    def has_error(self) -> bool:
        """Whether a closure has failed and the user has not been told yet."""
        return self._error is not None

    @property
    def num_ready(self) -> int:
        """How many closures could be run now."""
        return len(self._ready)

    def take(self, choose: Callable[[Iterator[Closure]], int]) -> list[Closure]:
        """Takes the first closures; `choose` looks at them in order and says how many."""
        with self._changed:
            if self._error is not None or not self._ready:
                self._is_hungry = True
                return []
            count = choose(iter(self._ready))
            taken = [self._ready.popleft() for _ in range(count)]
            self._ready_bytes -= _count_bytes(taken)
            self._move(taken, ClosureState.QUEUED, ClosureState.RUNNING)
            self._running.update(taken)
            self._changed.notify_all()
            return taken

    def give_back(self, closures: Sequence[Closure], *, retry: bool = False) -> None:
        """Puts closures that have not run, or may not have, at the front again."""
        if not closures:
            return
        with self._changed:
            self._running.difference_update(closures)
            if retry:
                self._num_retried += len(closures)
            if self._error is not None:
                self._cancel(closures, self._error)
            else:
                self._move(closures, ClosureState.RUNNING, ClosureState.QUEUED)
                self._ready.extendleft(reversed(closures))
                self._ready_bytes += _count_bytes(closures)
            self._changed.notify_all()

    def settle(self, closures: Sequence[Closure], outcomes: Sequence[object]) -> None:
        """Hands over what closures ended with: values, or `ClosureFailure`s."""
        with self._changed:
            self._running.difference_update(closures)
            finished: list[Closure] = []
            failed: list[Closure] = []
            cancelled: list[Closure] = []
            for closure, outcome in zip(closures, outcomes, strict=True):
                if closure.value.is_settled:
                    cancelled.append(closure)
                elif type(outcome) is ClosureFailure:
                    closure.value.set_error(outcome.error)
                    failed.append(closure)
                else:
                    closure.value.set_value(outcome)
                    finished.append(closure)
                if self._blocked:
                    self._unblock(closure.value)
            self._move(finished, ClosureState.RUNNING, ClosureState.FINISHED)
            self._move(failed, ClosureState.RUNNING, ClosureState.FAILED)
            self._move(cancelled, ClosureState.RUNNING, ClosureState.CANCELLED)
            for closure in failed:
                assert closure.value.error is not None
                self._fail(closure.value.error)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Cancels what waits; the user's next call raises the error."""
        with self._changed:
            self._fail(error)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Cancels everything, also what runs: there will be no more answers."""
        with self._changed:
            if self._end_reason is None:
                self._end_reason = reason
            self._fail(RuntimeError(f"ClusterCoordinator: {self._end_reason}."))
            self._changed.notify_all()

    # With the lock held.

    def _move(self, closures: Sequence[Closure], old: ClosureState, new: ClosureState) -> None:
        for closure in closures:
            closure.state = new
        self._counts[old] -= len(closures)
        self._counts[new] += len(closures)

    def _is_full(self) -> bool:
        waiting = len(self._ready) + self._counts[ClosureState.BLOCKED]
        return waiting >= self._size or (self._ready_bytes > MAX_BYTES and waiting > 0)

    def _is_idle(self) -> bool:
        blocked, running = self._counts[ClosureState.BLOCKED], self._counts[ClosureState.RUNNING]
        return not (self._ready or blocked or running)

    def _is_stopped(self) -> bool:
        return self._error is not None or self._end_reason is not None

    def _wait(self, until: Callable[[], bool]) -> None:
        beat_at = time.monotonic() + _BEAT_SECONDS
        while not until():
            self._changed.wait(_BEAT_SECONDS)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + _BEAT_SECONDS
                self._changed.release()
                try:
                    self._beat()
                finally:
                    self._changed.acquire()

    def _raise_error(self) -> None:
        """Raises the error of a closure, once nothing runs any more, and forgets it."""
        if self._error is not None and self._end_reason is None:
            running = ClosureState.RUNNING
            self._wait(lambda: self._counts[running] == 0 or self._end_reason is not None)
        if self._end_reason is not None:
            raise RuntimeError(f"ClusterCoordinator: {self._end_reason}.")
        error, self._error = self._error, None
        if error is not None:
            raise error.with_traceback(None)

    def _admit(self, closure: Closure) -> None:
        """Adds a closure to those that can be run, or to those that wait for a value."""
        if closure.needs or closure.function.needs:
            for value in _find_values((*closure.needs, *closure.function.needs)):
                if not value.is_settled:
                    self._move([closure], closure.state, ClosureState.BLOCKED)
                    self._blocked.setdefault(id(value), []).append(closure)
                    return
                if value.error is not None:
                    closure.value.set_error(value.error)
                    self._move([closure], closure.state, ClosureState.FAILED)
                    self._fail(value.error)
                    return
        if closure.state is not ClosureState.QUEUED:
            self._move([closure], closure.state, ClosureState.QUEUED)
        self._ready.append(closure)
        if closure.arguments is not None:
            self._ready_bytes += len(closure.arguments)

    def _unblock(self, value: RemoteValue) -> None:
        for closure in self._blocked.pop(id(value), ()):
            if self._error is not None and value.error is None:
                self._cancel([closure], self._error)
            else:
                self._admit(closure)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        waiting = [*self._ready, *(c for blocked in self._blocked.values() for c in blocked)]
        self._ready.clear()
        self._ready_bytes = 0
        self._blocked.clear()
        self._cancel(waiting, error)
        # They count as running until their workers have answered.
        for closure in self._running:
            if not closure.value.is_settled:
                closure.value.set_error(_make_cancellation(error, " while it was running"))

    def _cancel(self, closures: Sequence[Closure], cause: BaseException) -> None:
        for closure in closures:
            if not closure.value.is_settled:
                closure.value.set_error(_make_cancellation(cause))
            self._move([closure], closure.state, ClosureState.CANCELLED)


def _make_cancellation(cause: BaseException, when: str = "") -> ClosureCancelledError:
    reason = f"{type(cause).__name__}: {cause}"
    error = ClosureCancelledError(_CANCELLED.format(when, reason))
    error.__cause__ = cause
    return error


def _count_bytes(closures: Sequence[Closure]) -> int:
    return sum(len(each.arguments) for each in closures if each.arguments is not None)


def _find_values(needs: Sequence[WorkerReference]) -> Iterator[RemoteValue]:
    """Yields the remote values among references, and inside those that are settled."""
    for reference in needs:
        if isinstance(reference, RemoteValue):
            yield reference
        else:
            yield from _find_values(reference.definition.needs)
