"""Closures for tests without workers."""

from __future__ import annotations

import itertools
from typing import Any

from distribax.coordinator.closure_queue import Closure, ClosureQueue
from distribax.coordinator.references import Definition, DefinitionKind, WorkerReference
from distribax.coordinator.remote_value import RemoteValue


def closure(
    queue: ClosureQueue,
    name: str = "fn",
    arguments: bytes | None = None,
    needs: tuple[WorkerReference, ...] = (),
) -> Closure:
    """Makes a closure whose result the queue settles."""
    function = Definition(DefinitionKind.OBJECT, name, lambda _: b"")
    return Closure(function, arguments, needs, RemoteValue(queue))


def put(queue: ClosureQueue, count: int, **settings: Any) -> list[Closure]:
    """Puts some closures into a queue."""
    made = [closure(queue, **settings) for _ in range(count)]
    for each in made:
        queue.put(each)
    return made


def take(queue: ClosureQueue, count: int) -> list[Closure]:
    """Takes so many closures out of a queue."""
    return queue.take(lambda waiting: len(list(itertools.islice(waiting, count))))
