"""What the hub and the workers tell each other: one class for each message, a line of JSON.

The hub loads this file by its path: it imports nothing of distribax.
"""

from __future__ import annotations

import enum
import math
from typing import NotRequired, TypeAlias, TypedDict, final


class LossReason(enum.StrEnum):
    """Why a worker counts as lost."""

    DIED = "died"
    """Its connection has closed without a goodbye."""
    SILENT = "silent"
    """It has given no sign of life for too long."""
    FAILED = "failed"
    """Its program has ended with an error."""
    PAIR = "pair"
    """It and another worker do not hear each other, although the hub hears both."""


class CallProgress(TypedDict):
    """How far a worker is in the calls that all workers make together.

    Attributes:
        number: The number of its newest call.
        marks: Digests of all calls up to some numbers.
        here: The line where the program is now.
        name: What its newest call is.
        line: The line of the user's program that makes it.
        seconds: How long it has been waiting there; None if it is over.
        limit: How long it may wait there for one that is late.
    """

    number: int
    marks: list[tuple[int, int]]
    here: str
    name: NotRequired[str]
    line: NotRequired[str]
    seconds: NotRequired[float | None]
    limit: NotRequired[float | None]


class WorkerProgress:
    """What `CallProgress` says, checked by the hub."""

    def __init__(self, said: CallProgress) -> None:
        self.number = int(said["number"])
        self.name = str(said.get("name"))
        self.line = str(said.get("line"))
        seconds = said.get("seconds")
        self.seconds = None if seconds is None else float(seconds)
        self.limit = float(said.get("limit") or math.inf)
        self.marks = {int(number): int(mark) for number, mark in said["marks"]}
        self.here = str(said["here"])

    def contradicts(self, other: WorkerProgress) -> bool:
        """Tells whether both wait, in calls that never meet."""
        waits = self.seconds is not None and other.seconds is not None
        return waits and self.number == other.number and self.name != other.name

    def describe(self) -> str:
        """Returns this in words."""
        if not self.number:
            return f"is at {self.here}, and has made no common call yet"
        call = f"{self.name} (common call {self.number}) at {self.line}"
        if self.seconds is None:
            return f"is at {self.here}; its last common call was {call}"
        return f"has waited for {self.seconds:.0f} s in {call}"


@final
class Beat(TypedDict):
    """A sign of life, of the hub or a worker."""


@final
class Failed(TypedDict):
    """A worker leaves because of an error, or the hub could not start JAX's service."""

    failed: str


# What workers say.


@final
class Hello(TypedDict):
    """Which worker calls, and whether it agrees on the cluster, as its proof has shown."""

    worker: int
    agrees: bool


@final
class Reach(TypedDict):
    """Where other workers can call this one: a host and a port."""

    reach: tuple[str, int]


@final
class Unreachable(TypedDict):
    """Another worker has not been heard for some seconds."""

    unreachable: int
    seconds: float


@final
class Reachable(TypedDict):
    """Another worker is heard again."""

    reachable: int


@final
class At(TypedDict):
    """Where this worker is; it may ask where all are."""

    at: CallProgress
    ask: NotRequired[bool]


@final
class Done(TypedDict):
    """This worker's program has ended as it should."""

    done: bool


WorkerMessage: TypeAlias = Beat | Failed | Hello | Reach | Unreachable | Reachable | At | Done


# What the hub says until all workers are here.


@final
class Awaited(TypedDict):
    """Whom those who are here wait for."""

    waiting: list[str]


@final
class Missing(TypedDict):
    """Who has not come in time, and who has."""

    missing: list[str]
    joined: list[str]


@final
class Mistake(TypedDict):
    """Why these workers cannot form a cluster."""

    error: str


@final
class Complete(TypedDict):
    """All workers are here: the address of JAX's service, and their common settings."""

    address: str
    peer_timeout: float
    members: list[str]


MeetingMessage: TypeAlias = Beat | Awaited | Missing | Mistake | Failed | Complete


# What the hub says later.


@final
class Ended(TypedDict):
    """The workers whose programs have ended as they should."""

    done: list[int]


@final
class Peers(TypedDict):
    """Where all workers can be called, and the key that they show each other."""

    peers: list[tuple[str, int]]
    key: str


@final
class Apart(TypedDict):
    """Workers have made different calls, after this number of equal ones."""

    apart: int
    places: list[str]


@final
class Stuck(TypedDict):
    """Workers have waited for each other in different places, for too long."""

    stuck: float
    places: list[str]


@final
class Late(TypedDict):
    """Workers have waited for others for some seconds."""

    late: float
    places: list[str]


@final
class Places(TypedDict):
    """Where all workers are, as one has asked."""

    places: list[str]


LostWorker = TypedDict(
    "LostWorker",
    # What is known of the loss; "with" is the other one of a pair.
    {"lost": int, "how": LossReason, "text": str, "seconds": float, "with": int | None},
)

WatchMessage: TypeAlias = Beat | Ended | Peers | Apart | Stuck | Late | Places | LostWorker
HubMessage: TypeAlias = MeetingMessage | WatchMessage
