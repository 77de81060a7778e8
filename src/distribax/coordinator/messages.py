"""What the coordinator's process and its workers send each other, pickled."""

from __future__ import annotations

from typing import Any, NamedTuple

from distribax.coordinator.references import DefinitionKind


class SentDefinition(NamedTuple):
    """A definition on its way to a worker."""

    number: int
    kind: DefinitionKind
    name: str
    data: bytes


class ClosureBatch(NamedTuple):
    """Closures for one worker, which it runs in order.

    Attributes:
        number: Counts the batches of a worker's process.
        boot: The process that it is meant for; another one refuses it.
        definitions: Definitions that the process does not have yet.
        forgotten: The numbers of definitions that nobody uses any more.
        functions: For each closure the number of its function.
        arguments: For each closure its pickled arguments, or None if it has none.
    """

    number: int
    boot: str
    definitions: tuple[SentDefinition, ...]
    forgotten: tuple[int, ...]
    functions: list[int]
    arguments: list[bytes | None]


class Timing(NamedTuple):
    """How often a function was called in a batch, and how many seconds that took in all."""

    calls: int
    seconds: float


class Reply(NamedTuple):
    """What became of a batch.

    Attributes:
        outcomes: One for each closure that was run: what `pack_result` or `pack_error` made of it.
            If there are fewer than closures, the others were not run.
        timings: How long each function took, by its number.
        refused: Whether nothing was run, as the batch was meant for another process.
        printed: What the functions have printed since that was last told.
        unreachable: Which parameter server the worker cannot reach, in a sentence. Then there are
            no outcomes: what functions have written may not have arrived.
    """

    outcomes: list[Any]
    timings: dict[int, Timing]
    refused: bool = False
    printed: str = ""
    unreachable: str = ""


class Greeting(NamedTuple):
    """What a worker's process says when it has been started."""

    boot: str
    pid: int
    host: str


class Pulse(NamedTuple):
    """A sign of life.

    Attributes:
        batch: The batch that runs.
        started: How many of its closures have been started.
        boot: The process that gives it.
        printed: The lines that functions have printed since that was last told.
    """

    batch: int
    started: int
    boot: str
    printed: str = ""
