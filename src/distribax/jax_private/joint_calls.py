"""The calls that all processes make together: which one this process has come to.

A process that waits in such a call for another one cannot be interrupted, and cannot find out what
the other one does instead. If the other one makes another call, the two may even exchange values
that do not belong together. So each process notes its calls, and the workers compare their notes
(`cluster/peers`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import jax
from typing_extensions import override

from distribax.jax_private.tracing import is_tracer
from distribax.jax_private.user_code import find_user_line

_NUM_KEPT: Final = 4096
_NUM_MARKS: Final = 64
_OPEN_SECONDS: Final = 2.0


class JointCall:
    """One call: a program, or an exchange of small values, that all processes take part in.

    Attributes:
        name: What is called; the same in all processes.
        line: The line of the user's program that calls it.
        began: When, in seconds of `time.monotonic()`.
        limit: How many seconds it may wait for the others; None if the call does not say.
        is_prepared: Whether it makes no other calls any more before it is made itself.
    """

    def __init__(self, name: str, line: str, limit: float | None, is_prepared: bool) -> None:
        self.name = name
        self.line = line
        self.began = time.monotonic()
        self.limit = limit
        self.is_prepared = is_prepared
        self._has_returned = False
        self._result: jax.Array | None = None

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.monotonic() - self.began

    @property
    def is_overdue(self) -> bool:
        """Whether it seems to wait for others, and is the next call of this process for sure."""
        return self.is_prepared and self.seconds >= _OPEN_SECONDS

    def end_preparation(self) -> None:
        """Notes that other calls, such as those that fetch what this one needs, are made."""
        self.is_prepared = True

    def set_results(self, results: Iterable[object]) -> None:
        """Notes what the call has returned, which may not be computed yet."""
        self._result = next((each for each in results if isinstance(each, jax.Array)), None)

    def is_like(self, other: JointCall) -> bool:
        """Whether another call is made in the same line and has the same name."""
        return (self.name, self.line) == (other.name, other.line)

    def describe(self) -> str:
        """Returns what is called, and where."""
        return f"{self.name} at {self.line}"

    def forget_results(self) -> None:
        """Lets what was returned be freed; a later call says how far this process is."""
        self._result = None

    def close(self) -> None:
        """Notes that the call has returned."""
        self._has_returned = True

    @property
    def is_pending(self) -> bool:
        """Whether the call waits, or what it has returned is still to be computed."""
        if not self._has_returned:
            return True
        result = self._result
        # What a later program has consumed does not matter any more.
        if result is None or is_tracer(result) or result.is_deleted():
            return False
        is_ready: bool = result.is_ready()  # type: ignore[attr-defined]  # JAX does not declare it.
        return not is_ready


@dataclasses.dataclass
class _EqualCalls:
    """Calls that are like each other and followed each other: the newest one, and their count."""

    newest: JointCall
    count: int = 1


class JointCalls:
    """The calls of this process.

    Attributes:
        is_watched: Whether somebody looks at them; if not, nothing is noted.
        limit: How many seconds a call may wait that does not say it itself.
        number: How many calls have been made.
        marks: Digests of all calls up to some numbers. Two processes that are not at the same call
            have one of these numbers in common, as long as they have made the same calls.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self.limit: float | None = None
        self.number = 0
        self._digest = 0
        # Of the last calls, as programs are started ahead of those that run; and of fewer and fewer
        # before them, the last two multiples of each power of 2.
        self._recent: deque[tuple[int, int]] = deque(maxlen=_NUM_MARKS)
        self._levels: list[tuple[tuple[int, int], tuple[int, int]]] = []
        # Equal calls that follow each other are one entry: however fast a loop of steps is, the
        # call in which the workers parted is still there when they find out.
        self._made: deque[_EqualCalls] = deque(maxlen=_NUM_KEPT)
        # A program whose inputs are collected may ask the other processes something meanwhile.
        self._open: list[JointCall] = []

    @contextlib.contextmanager
    def record(
        self, name: str, limit: float | None = None, *, is_prepared: bool = True
    ) -> Iterator[JointCall]:
        """Notes that a call is made inside; one that raises an exception is not counted.

        Args:
            name: What is called; the same in all processes.
            limit: How many seconds it may wait for the others; None if the call does not say.
            is_prepared: Whether no other call is made inside before this one is; if there may be
                one, the caller says when that is over (`JointCall.end_preparation`).
        """
        # Behind this frame is that of `contextlib`, and then the caller's.
        line = find_user_line(sys._getframe(2)) if self.is_watched else ""
        call = JointCall(name, line, limit, is_prepared)
        self._open.append(call)
        try:
            yield call
        finally:
            self._open.remove(call)
        call.close()
        if self.is_watched:
            self._count(call)

    def _count(self, call: JointCall) -> None:
        last = self._made[-1] if self._made else None
        if last is not None and last.newest.is_like(call):
            last.newest = call
            last.count += 1
        else:
            if last is not None:
                last.newest.forget_results()
            self._made.append(_EqualCalls(call))
        self._digest = zlib.crc32(call.name.encode(), self._digest)
        self.number += 1
        mark, step = (self.number, self._digest), 1
        self._recent.append(mark)
        for level in itertools.count():
            if self.number % step:
                break
            if level == len(self._levels):
                self._levels.append(((0, 0), mark))
            else:
                self._levels[level] = (self._levels[level][1], mark)
            step *= 2

    @property
    def marks(self) -> dict[int, int]:
        """Digests of all calls up to some numbers."""
        made = {**dict(mark for pair in list(self._levels) for mark in pair), **dict(self._recent)}
        newest = self.newest
        if self._open and newest is not None and newest.is_overdue:
            # It waits for others, which may have gone on to the next calls already.
            made[self.number + 1] = zlib.crc32(newest.name.encode(), self._digest)
        return made

    @property
    def newest(self) -> JointCall | None:
        """The call that is being made, or else the last one."""
        with contextlib.suppress(IndexError):  # It may end meanwhile.
            return self._open[-1]
        return self._made[-1].newest if self._made else None

    @property
    def is_in_call(self) -> bool:
        """Whether a call is being made that has not returned."""
        return bool(self._open)

    def count_since(self, number: int) -> Counter[str]:
        """Returns how often each call was made after the first `number`, as far as it is known."""
        counts = Counter(call.describe() for call in list(self._open))
        left = self.number - number
        for calls in reversed(list(self._made)):
            if left <= 0:
                break
            counts[calls.newest.describe()] += min(calls.count, left)
            left -= calls.count
        return counts

    def record_for(
        self,
        get_name: Callable[[], str],
        *values: object,
        limit: float | None = None,
        is_prepared: bool = True,
    ) -> contextlib.AbstractContextManager[JointCall]:
        """Like `record`, for a call that all processes make only if a value is spread over them."""
        if self.is_watched and any(map(_spans_processes, values)):
            return self.record(get_name(), limit, is_prepared=is_prepared)
        return _NOT_RECORDED


class _NotRecorded(JointCall):
    """Stands for calls that nobody waits for."""

    @override
    def set_results(self, results: Iterable[object]) -> None:
        """Does nothing."""


def _spans_processes(value: object) -> bool:
    return isinstance(value, jax.Array) and not is_tracer(value) and not value.is_fully_addressable


_NOT_RECORDED: Final = contextlib.nullcontext(_NotRecorded("", "", None, True))

joint_calls: Final = JointCalls()
"""The calls of this process."""
