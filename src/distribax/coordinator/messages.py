"""What the coordinator and its workers send each other: small tuples, pickled."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shipment(NamedTuple):
    """A definition on its way to a worker; `kind` is the value of a `Kind`."""

    number: int
    kind: str
    name: str
    data: bytes


class Batch(NamedTuple):
    """Closures for one worker, which it runs in order.

    Attributes:
        number: Counts the batches of a worker's process.
        boot: The process that it is meant for; another one refuses it.
        shipments: Definitions that the process does not have yet.
        forgotten: Definitions that nobody uses any more.
        calls: For each closure the number of its function and its pickled arguments, if any.
    """

    number: int
    boot: str
    shipments: tuple[Shipment, ...]
    forgotten: tuple[int, ...]
    calls: list[tuple[int, bytes | None]]


class Reply(NamedTuple):
    """What became of a batch.

    Attributes:
        outcomes: One for each closure that was run: a value, a `Packed` one, or a `Raised`. There
            may be fewer of them than closures: the others were not run.
        seconds: How long each function took, by its number, and how often it was run.
        refused: Whether nothing was run, as the batch was meant for another process.
    """

    outcomes: list[Any]
    seconds: dict[int, tuple[int, float]]
    refused: bool = False


class Packed(NamedTuple):
    """A value that is pickled apart, as it is not a plain one."""

    data: bytes


class Raised(NamedTuple):
    """An exception of the user's function: pickled if that is possible, and in words."""

    data: bytes | None
    summary: str
    traceback: str


class Greeting(NamedTuple):
    """What a worker's process says when it has been started."""

    boot: str
    pid: int
    host: str


class Pulse(NamedTuple):
    """A sign of life: the batch that runs, and how many of its closures have been started."""

    boot: str
    at: tuple[int, int]


class Start(NamedTuple):
    """What a worker's process needs in the beginning; `setup` is a pickled `WorkerSetup`."""

    worker_index: int
    setup: bytes
