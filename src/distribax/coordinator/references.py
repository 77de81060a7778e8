"""Things that a scheduled function uses and that workers keep: functions, data sets, values.

Each is shipped to a worker once, as a definition with a number. Where an argument or a function
contains a `Reference`, the pickle holds the number alone, and the worker looks it up.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_numbers = itertools.count(1)


def new_number() -> int:
    """Returns a number that nothing in this process has yet."""
    return next(_numbers)


class Kind(enum.Enum):
    """What a worker makes of a definition's bytes."""

    OBJECT = "object"
    """The object that was pickled."""
    VALUE = "value"
    """A new copy of the object that was pickled, for each function that uses it."""
    DATASET = "dataset"
    """The data set that was pickled."""
    DATASET_FUNCTION = "dataset function"
    """The data set that the pickled function makes."""
    ITERATOR = "iterator"
    """A new iterator of the data set that was pickled, itself a reference."""


class Definition:
    """Something that workers keep. `needs` are the references inside it.

    `part` returns the bytes for a worker's index; mostly they are the same for all.
    """

    __slots__ = ("__weakref__", "kind", "name", "needs", "number", "part")

    def __init__(
        self,
        kind: Kind,
        name: str,
        part: Callable[[int], bytes],
        needs: tuple[Reference, ...] = (),
        number: int | None = None,
    ) -> None:
        self.number = new_number() if number is None else number
        self.kind = kind
        self.name = name
        self.part = part
        self.needs = needs


class Reference:
    """Base of what is passed to a worker by number."""

    __slots__ = ()

    @property
    def is_settled(self) -> bool:
        """Whether workers can be told of it by now."""
        return True

    @property
    def definition(self) -> Definition:
        """What workers are to know of it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what workers are to know.")

    @property
    def reference_number(self) -> int:
        """The number that stands for it in a pickle."""
        return self.definition.number

    def __reduce__(self) -> Any:
        collected: list[Reference] | None = getattr(_thread, "collected", None)
        if collected is None:
            raise TypeError(
                f"{type(self).__name__} cannot be pickled: it belongs to the coordinator's "
                "process. Pass it to coordinator.schedule() among args or kwargs."
            )
        collected.append(self)
        return resolve, (self.reference_number,)


_thread = threading.local()


@contextlib.contextmanager
def collecting() -> Iterator[list[Reference]]:
    """Lets references be pickled in this thread, and gathers those that are met."""
    outer = getattr(_thread, "collected", None)
    collected: list[Reference] = []
    _thread.collected = collected
    try:
        yield collected
    finally:
        _thread.collected = outer


_lookup: list[Callable[[int], Any]] = []


def set_lookup(lookup: Callable[[int], Any]) -> None:
    """Says how this process, a worker, finds what a number stands for."""
    _lookup[:] = [lookup]


def resolve(number: int) -> Any:
    """Returns what a reference stands for; called while a worker unpickles."""
    assert _lookup, "references are resolved on workers"
    return _lookup[0](number)
