"""What servers tell of themselves: plain values by name, as they are sent and as users get them."""

from __future__ import annotations

from typing import TypedDict


class RoundStatus(TypedDict):
    """The rounds of one optimizer.

    Attributes:
        applied: How many were applied.
        contributed: The clients whose contributions to this one are in.
        incomplete: How many were applied because somebody had waited too long.
        late: How often each client was missing then.
    """

    applied: int
    contributed: list[str]
    incomplete: int
    late: dict[str, int]


class IncompleteRound(TypedDict):
    """A round that has some contributions, and waits for others.

    Attributes:
        optimizer: The optimizer's uid.
        contributions: How many are in.
        num_shares: How many it needs.
        seconds: How many seconds ago the first one came.
        missing: The workers whose contributions are missing.
        waiting: The workers that wait until they may go on.
    """

    optimizer: str
    contributions: int
    num_shares: int
    seconds: float
    missing: list[int]
    waiting: list[int]


class SnapshotStatus(TypedDict, total=False):
    """Which snapshots a server has taken and read.

    Attributes:
        snapshot: The path of the last one.
        snapshot_time: When it was taken, in seconds of `time.time()`.
        snapshot_updates: How many optimizer updates it holds.
        snapshot_error: Why the last attempt failed.
        restored: The one that the server began with.
        damaged: Those that could not be restored, and why.
    """

    snapshot: str | None
    snapshot_time: float | None
    snapshot_updates: int
    snapshot_error: str | None
    restored: str | None
    damaged: list[str]


class ServerStatus(SnapshotStatus, total=False):
    """What a server holds and has done.

    Attributes:
        index: The server's index.
        pid: The id of its process.
        boot: The name of its process.
        parameters: How many it holds.
        optimizers: How many it holds.
        bytes: The size of the parameters.
        updates: How many optimizer updates were applied, those in a restored snapshot included.
        counts: How many changes of each kind were made, likewise.
        lost_counts: How many all restarts have lost; None if that is not known.
        restored_counts: How many are in the restored snapshot.
        connections: How many clients are connected.
        rounds: The rounds of each synchronous optimizer.
    """

    index: int
    pid: int
    boot: str
    parameters: int
    optimizers: int
    bytes: int
    updates: int
    counts: dict[str, int]
    lost_counts: dict[str, int] | None
    restored_counts: dict[str, int]
    connections: int
    rounds: dict[str, RoundStatus]


class WatchedServerStatus(ServerStatus):
    """A server's last status, if it has answered, and what the strategy knows of its restarts.

    Attributes:
        restarts: How often its process was started again.
        lost: What the last restart has lost, in a sentence; empty if there was none.
    """

    restarts: int
    lost: str
