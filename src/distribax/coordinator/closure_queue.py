"""The closures that wait for a worker, and the account of all that were scheduled."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from distribax.coordinator.references import Definition, Reference
from distribax.coordinator.remote_value import RemoteValue
from distribax.errors import ClosureCancelledError

MAX_BYTES = 1 << 30
"""How many bytes of arguments may wait; more wait only alone."""
_BEAT_SECONDS = 0.25
"""How often a thread that waits for all closures may do something else."""


class Closure:
    """A function and its arguments, to be run once at least."""

    __slots__ = ("arguments", "function", "losses", "needs", "value")

    def __init__(
        self,
        function: Definition,
        arguments: bytes | None,
        needs: tuple[Reference, ...],
        value: RemoteValue,
    ) -> None:
        self.function = function
        self.arguments = arguments
        # The references in its arguments; those in its function are the function's.
        self.needs = needs
        self.value = value
        # How many workers have died while it may have been running.
        self.losses = 0


@dataclass
class Counts:
    """How many closures there are, and were, in each state."""

    scheduled: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    queued: int = 0
    running: int = 0


@dataclass(frozen=True)
class Failure:
    """What a closure ended with instead of a value."""

    error: BaseException


class ClosureQueue:
    """A bounded queue of closures between the user's threads and the dispatcher's.

    After a failure nothing more is given out, what waits is cancelled, and the error is raised to
    the next user who comes, once everything that runs has ended. Then the queue works as before.

    Args:
        size: How many closures may wait; `put` waits when it is full.
        wake: Called when there is a closure for a dispatcher that has found none.
    """

    def __init__(
        self,
        size: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._size = size
        self._wake = wake
        self._changed = threading.Condition(threading.Lock())
        self._ready: deque[Closure] = deque()
        self._ready_bytes = 0
        # Closures whose arguments are not there yet, by the value that they wait for.
        self._blocked: dict[int, list[Closure]] = {}
        self._num_blocked = 0
        self._in_flight = 0
        self._hungry = False
        self._error: BaseException | None = None
        self._ended: str | None = None
        self._totals = Counts()

    # The user's side.

    def put(self, closure: Closure) -> None:
        """Adds a closure; waits while the queue is full, and raises the error of an earlier one."""
        with self._changed:
            if self._error is not None or self._ended is not None:
                self._raise_error()
            if self._is_full():
                self._wait(lambda: not self._is_full() or self._is_stopped())
                self._raise_error()
            self._totals.scheduled += 1
            self._admit(closure)
            hungry, self._hungry = self._hungry, False
        if hungry:
            self._wake()

    def join(self, beat: Callable[[], None] | None = None) -> None:
        """Waits until nothing waits or runs; raises the error of a closure if there is one.

        `beat` is called now and then meanwhile, in this thread.
        """
        with self._changed:
            self._wait(lambda: self._is_idle() or self._is_stopped(), beat)
            self._raise_error()

    def done(self) -> bool:
        """Tells whether nothing waits or runs; raises the error of a closure if there is one."""
        with self._changed:
            self._raise_error()
            return self._is_idle()

    def wait_for(self, value: RemoteValue) -> None:
        """Waits until a value is there, or never will be."""
        with self._changed:
            self._wait(lambda: value.is_settled or self._ended is not None)
            if not value.is_settled:
                assert self._ended is not None
                value.set_error(ClosureCancelledError(_cancelled(self._ended)))

    def counts(self) -> Counts:
        """Returns how many closures are in each state."""
        with self._changed:
            totals = Counts(**vars(self._totals))
            totals.queued = len(self._ready) + self._num_blocked
            totals.running = self._in_flight
            return totals

    # The dispatcher's side.

    @property
    def has_error(self) -> bool:
        """Whether a closure has failed and nobody has been told yet."""
        return self._error is not None

    @property
    def num_ready(self) -> int:
        """How many closures could be run now."""
        return len(self._ready)

    def take(self, choose: Callable[[Iterator[Closure]], int]) -> list[Closure]:
        """Takes the first closures; `choose` looks at them in order and says how many."""
        with self._changed:
            if self._error is not None or not self._ready:
                self._hungry = True
                return []
            count = choose(iter(self._ready))
            taken = [self._ready.popleft() for _ in range(count)]
            self._ready_bytes -= sum(_size_of(closure) for closure in taken)
            self._in_flight += count
            self._changed.notify_all()
            return taken

    def give_back(self, closures: Sequence[Closure], *, retry: bool = False) -> None:
        """Puts closures that have not run, or may not have, at the front again."""
        if not closures:
            return
        with self._changed:
            self._in_flight -= len(closures)
            if retry:
                self._totals.retried += len(closures)
            if self._error is not None:
                self._cancel(closures, self._error)
            else:
                self._ready.extendleft(reversed(closures))
                self._ready_bytes += sum(_size_of(closure) for closure in closures)
            self._changed.notify_all()

    def settle(self, closures: Sequence[Closure], outcomes: Sequence[Any]) -> None:
        """Hands over what closures ended with: values, or `Failure`s."""
        with self._changed:
            self._in_flight -= len(closures)
            failed: list[Failure] = []
            for closure, outcome in zip(closures, outcomes, strict=True):
                if type(outcome) is Failure:
                    closure.value.set_error(outcome.error)
                    failed.append(outcome)
                else:
                    closure.value.set_value(outcome)
                if self._blocked:
                    self._unblock(closure.value)
            self._totals.finished += len(closures) - len(failed)
            self._totals.failed += len(failed)
            for outcome in failed:
                self._fail(outcome.error)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raises an error to the next user, and cancels what waits."""
        with self._changed:
            self._fail(error)
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Cancels everything, also what runs: there will be no more answers."""
        with self._changed:
            if self._ended is None:
                self._ended = reason
            self._fail(RuntimeError(f"ClusterCoordinator: {self._ended}."))
            self._changed.notify_all()

    # With the lock held.

    def _is_full(self) -> bool:
        waiting = len(self._ready) + self._num_blocked
        return waiting >= self._size or (self._ready_bytes > MAX_BYTES and waiting > 0)

    def _is_idle(self) -> bool:
        return not (self._ready or self._in_flight or self._num_blocked)

    def _is_stopped(self) -> bool:
        return self._error is not None or self._ended is not None

    def _wait(self, until: Callable[[], bool], beat: Callable[[], None] | None = None) -> None:
        while not until():
            self._changed.wait(None if beat is None else _BEAT_SECONDS)
            if beat is not None:
                self._changed.release()
                try:
                    beat()
                finally:
                    self._changed.acquire()

    def _raise_error(self) -> None:
        """Raises the error of a closure, once nothing runs any more, and forgets it."""
        if self._error is not None and self._ended is None:
            self._wait(lambda: self._in_flight == 0 or self._ended is not None)
        if self._ended is not None:
            raise RuntimeError(f"ClusterCoordinator: {self._ended}.")
        error, self._error = self._error, None
        if error is not None:
            raise error.with_traceback(None)

    def _admit(self, closure: Closure) -> None:
        """Adds a closure to those that can be run, or to those that wait for a value."""
        if closure.needs or closure.function.needs:
            for value in _values((*closure.needs, *closure.function.needs)):
                if not value.is_settled:
                    self._blocked.setdefault(id(value), []).append(closure)
                    self._num_blocked += 1
                    return
                if value.error is not None:
                    closure.value.set_error(value.error)
                    self._totals.failed += 1
                    self._fail(value.error)
                    return
        self._ready.append(closure)
        self._ready_bytes += _size_of(closure)

    def _unblock(self, value: RemoteValue) -> None:
        closures = self._blocked.pop(id(value), ())
        self._num_blocked -= len(closures)
        for closure in closures:
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
        self._num_blocked = 0
        self._cancel(waiting, error)

    def _cancel(self, closures: Sequence[Closure], cause: BaseException) -> None:
        for closure in closures:
            error = ClosureCancelledError(_cancelled(f"{type(cause).__name__}: {cause}"))
            error.__cause__ = cause
            closure.value.set_error(error)
        self._totals.cancelled += len(closures)


def _cancelled(reason: str) -> str:
    return f"the function was cancelled before its end: {reason}"


def _size_of(closure: Closure) -> int:
    return len(closure.arguments) if closure.arguments is not None else 0


def _values(needs: Sequence[Reference]) -> Iterator[RemoteValue]:
    """Yields the remote values among references, also those inside others that are there."""
    for reference in needs:
        if isinstance(reference, RemoteValue):
            yield reference
        else:
            yield from _values(reference.definition.needs)
