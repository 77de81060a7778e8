"""Who an input pipeline feeds."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import Mesh


@dataclass(frozen=True, eq=False)
class InputTarget:
    """Who is to be fed: the local replicas' devices, and this worker's place among the workers."""

    devices: tuple[jax.Device | None, ...]
    mesh: Mesh | None
    num_replicas_in_sync: int
    num_workers: int = 1
    worker_id: int = 0

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this process feeds."""
        return len(self.devices)
