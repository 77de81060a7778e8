"""What the coordinator needs of a strategy and of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from distribax.types import Args, Kwargs, StepFn


class WorkerSetup(Protocol):
    """Goes to each worker's process and makes it a worker of the strategy."""

    def start(self, worker_index: int) -> None:
        """Makes the process's own side of the strategy."""

    def run(self, fn: StepFn, args: Args, kwargs: Kwargs) -> Any:
        """Calls `fn` in the strategy's scope."""

    def flush(self) -> None:
        """Returns when all that the functions have written is where it belongs."""


class WorkerEngine(Protocol):
    """Where the workers' processes come from."""

    @property
    def num_workers(self) -> int: ...

    def worker_options(self, index: int) -> Mapping[str, Any]:
        """Returns Ray's options for the actor of a worker."""


@runtime_checkable
class CoordinatedStrategy(Protocol):
    """A strategy whose functions a coordinator can schedule.

    Attributes:
        cluster_coordinator: The strategy's coordinator, or None. The coordinator sets it; a
            strategy that ends calls its `close()` first.
    """

    cluster_coordinator: Any

    @property
    def engine(self) -> WorkerEngine:
        """Where the workers' processes come from."""

    def worker_setup(self) -> WorkerSetup:
        """Returns what makes a process a worker; it is pickled."""

    def complete_rounds(self) -> None:
        """Applies what workers have contributed to a step that waits for others.

        It is called when there is nothing left to schedule.
        """

    def server_status(self) -> Sequence[Mapping[str, Any]]:
        """Returns what is known of each parameter server."""
