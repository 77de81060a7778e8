"""Iterators and data set loops inside `dx.function`: what the host does for a compiled step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Self, TypeAlias

from distribax.context.scoped import set_within
from distribax.errors import HostMode, HostOnly
from distribax.execution.traces import frames


class Optional:
    """An element, or the knowledge that there is none.

    Args:
        value: The element.
        present: Whether there is one.
    """

    def __init__(self, value: object = None, *, present: bool) -> None:
        self._value = value
        self._present = present

    def has_value(self) -> bool:
        """Tells whether there is an element.

        Returns:
            False at the end of the input.
        """
        return self._present

    def get_value(self) -> Any:
        """Returns the element.

        Returns:
            What `next` would have returned.

        Raises:
            ValueError: There is none.
        """
        if not self._present:
            raise ValueError(
                "get_value: the iterator was at its end. Ask has_value() first, or loop with "
                "`for x in dist_dataset:`."
            )
        return self._value


class LiftedIterator:
    """Base of iterators whose `next` works inside `dx.function`.

    A subclass overrides `fetch`. Inside a function, `next(iterator)` becomes an input of the
    compiled step: at each call the host fetches the element and feeds it.
    """

    def fetch(self) -> Any:
        """Fetches the next element on the host.

        Returns:
            The element: a nest of arrays.

        Raises:
            StopIteration: There is no more element.
            NotImplementedError: The subclass does not override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say where its elements are from: override fetch(self)."
        )

    def get_next(self) -> Any:
        """Returns the next element, as `next` does.

        Returns:
            The element: a nest of arrays, or of distributed values.

        Raises:
            OutOfRangeError: There is no more element; it is a StopIteration too.
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """Returns the next element if there is one, and says so.

        Returns:
            An object with `has_value()` and `get_value()`.
        """
        require_host("get_next_as_optional()")
        try:
            return Optional(next(self), present=True)
        except StopIteration:
            return Optional(present=False)

    def __iter__(self) -> Self:
        require_host("a loop over an iterator")
        return self

    def __next__(self) -> Any:
        return pull(self)


Pulled: TypeAlias = tuple[LiftedIterator, Any]
"""An iterator, and an element that was fetched from it."""

_replay: ContextVar[deque[Pulled] | None] = ContextVar("distribax_replay", default=None)
_host_runs: ContextVar[Callable[..., Any] | None] = ContextVar("distribax_host_runs", default=None)


def require_host(what: str) -> None:
    """Inside a trace, hands the function over to the host, which loops around compiled steps."""
    if frames.current() is not None:
        raise HostOnly(what, HostMode.LOOP)


def pull(iterator: LiftedIterator) -> Any:
    """Returns the next element: fetched now, or as the input of the function being traced."""
    waiting = _replay.get()
    if waiting and waiting[0][0] is iterator:
        return waiting.popleft()[1]
    frame = frames.current()
    if frame is None:
        return iterator.fetch()
    if not isinstance(frame, frames.FunctionFrame):
        raise RuntimeError(
            "next(iterator): called inside strategy.run() of a compiled function. Call it outside "
            "the replica and pass the element: strategy.run(fn, args=(next(it),))."
        )
    return frame.pull(iterator)


def replay(elements: Iterable[Pulled]) -> AbstractContextManager[None]:
    """Gives elements that were fetched for a compiled call to the eager call that replaces it."""
    return set_within(_replay, deque(elements))


def compile_runs(compiled_run: Callable[..., Any] | None) -> AbstractContextManager[None]:
    """Sends each `strategy.run` of the code inside to `compiled_run`; None lets it run eagerly."""
    return set_within(_host_runs, compiled_run)


def get_host_compiled_run() -> Callable[..., Any] | None:
    """Returns the way to compile a `strategy.run` in a host loop, or None outside one."""
    return _host_runs.get()
