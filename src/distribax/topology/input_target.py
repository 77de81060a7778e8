"""The replicas and the worker that an input pipeline feeds."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from distribax.topology.mesh import make_replica_mesh
from distribax.topology.restart import Renew, follow


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

    def __post_init__(self) -> None:
        follow(self)

    def renew_devices(self, renew: Renew) -> None:
        """Replaces the devices, because JAX has been started again with more of them."""
        devices = tuple(None if device is None else renew(device) for device in self.devices)
        # Frozen for everybody else.
        object.__setattr__(self, "devices", devices)
        if self.mesh is not None:
            mesh = make_replica_mesh([renew(device) for device in self.mesh.devices.flat])
            object.__setattr__(self, "mesh", mesh)

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this process feeds."""
        return len(self.devices)
