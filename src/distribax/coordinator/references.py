"""Things that a scheduled function uses and that workers keep: functions, data sets, values.

Each is sent to a worker once, as a definition with a number. Where an argument or a function
contains a `WorkerReference`, the pickle holds only the number, and the worker looks it up.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

_numbers = itertools.count(1)


def make_number() -> int:
    """Returns a number that nothing in this process has yet."""
    return next(_numbers)


class DefinitionKind(enum.Enum):
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


@dataclass(slots=True, weakref_slot=True, eq=False)
class Definition:
    """Something that workers keep.

    Attributes:
        kind: What a worker makes of it.
        name: What error messages call it.
        dump_for: Returns the bytes for a worker's index; mostly they are the same for all.
        needs: The references inside it.
        number: Stands for it in pickles.
    """

    kind: DefinitionKind
    name: str
    dump_for: Callable[[int], bytes]
    needs: tuple[WorkerReference, ...] = ()
    number: int = field(default_factory=make_number)


class WorkerReference:
    """Base of what is passed to a worker by number.

    Args:
        definition: What workers are sent; None asks `_define` when it is first needed.
    """

    __slots__ = ("__weakref__", "_definition")

    def __init__(self, definition: Definition | None = None) -> None:
        self._definition = definition

    @property
    def definition(self) -> Definition:
        """What workers are sent."""
        if self._definition is None:
            self._definition = self._define()
        return self._definition

    def _define(self) -> Definition:
        raise NotImplementedError(f"{type(self).__name__} does not say what workers are to know.")

    @property
    def reference_number(self) -> int:
        """The number that stands for it in a pickle."""
        return self.definition.number

    @override
    def __reduce__(self) -> tuple[Callable[[int], object], tuple[int]]:
        collected = _thread.collected
        if collected is None:
            raise TypeError(
                f"{type(self).__name__} cannot be pickled: it belongs to the coordinator's "
                "process. Pass it to coordinator.schedule() among args or kwargs."
            )
        collected.append(self)
        return resolve, (self.reference_number,)


class _Thread(threading.local):
    """The references that are being collected in each thread, or None."""

    collected: list[WorkerReference] | None = None


_thread = _Thread()


@contextlib.contextmanager
def collect_references() -> Iterator[list[WorkerReference]]:
    """Lets references be pickled in this thread, and collects those that are met."""
    outer = _thread.collected
    collected: list[WorkerReference] = []
    _thread.collected = collected
    try:
        yield collected
    finally:
        _thread.collected = outer


_lookup: Callable[[int], Any] | None = None


def set_lookup(lookup: Callable[[int], Any]) -> None:
    """Says how this process, a worker, finds what a number stands for."""
    global _lookup
    _lookup = lookup


def resolve(number: int) -> Any:
    """Returns what a reference stands for; called while a worker unpickles."""
    assert _lookup is not None, "references are resolved on workers"
    return _lookup(number)
