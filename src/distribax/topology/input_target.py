"""The replicas and the worker that an input pipeline feeds."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import Mesh


@dataclass(frozen=True, eq=False)
class InputTarget:
    """What an input pipeline must know about its strategy.

    Attributes:
        devices: The devices of the local replicas; None for a replica without one.
        mesh: The mesh of all replicas, if there is one.
        num_replicas_in_sync: How many replicas there are on all workers.
        num_workers: How many workers there are.
        worker_id: The number of this worker.
    """

    devices: tuple[jax.Device | None, ...]
    mesh: Mesh | None
    num_replicas_in_sync: int
    num_workers: int = 1
    worker_id: int = 0

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this process feeds."""
        return len(self.devices)
