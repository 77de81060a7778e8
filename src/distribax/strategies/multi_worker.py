"""Replicas on the devices of several machines, with mirrored variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from distribax import jax_compat
from distribax.cluster import ClusterResolver, resolve
from distribax.cluster.bootstrap import Membership, join_cluster
from distribax.collectives import AllReduce, CommunicationOptions
from distribax.execution import frames
from distribax.strategies.mirrored import MirroredExtended
from distribax.strategies.strategy import Strategy
from distribax.topology import InputTarget, device_name, local_devices, resolve_devices
from distribax.values import DistributedValues

_JOIN_SECONDS = 30.0


class MultiWorkerExtended(MirroredExtended):
    """Mirrored replicas over the devices of all workers' processes."""

    def __init__(
        self,
        devices: Sequence[jax.Device],
        membership: Membership,
        options: CommunicationOptions | None,
    ) -> None:
        super().__init__(devices, AllReduce())
        self._membership = membership
        self._options = options
        assert self.mesh is not None
        self._local = local_devices(self.mesh)

    @property
    def local_devices(self) -> tuple[jax.Device, ...]:
        return self._local

    @property
    def first_replica(self) -> int:
        return self._workers.index(self._local[0])

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of this worker's devices that run replicas."""
        return tuple(device_name(device) for device in self._local)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of this worker's devices that hold variables."""
        return self.worker_devices

    def _copy_devices(self, count: int) -> tuple[jax.Device, ...]:
        return self._local

    def input_target(self) -> InputTarget:
        return InputTarget(
            self._local,
            self.mesh,
            self.num_replicas_in_sync,
            self._membership.num_workers,
            self._membership.worker_id,
        )

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        if frames.current() is None and destinations is None:
            destinations = self._local
        return super().broadcast_to(tensor, destinations)

    def first_value(self, value: DistributedValues, destinations: Any) -> Any:
        if frames.current() is not None:
            return super().first_value(value, destinations)
        first = jax_compat.broadcast_from_first(np.asarray(value.values[0]))
        return self.broadcast_to(first)

    def gather_to(
        self, value: Any, destinations: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        gathered = super().gather_to(value, destinations, axis, options)
        if frames.current() is not None or self._membership.num_workers == 1:
            return gathered
        local = np.asarray(gathered.get())
        parts = jax_compat.gather_from_all(local, axis)
        return self.broadcast_to(np.concatenate(parts, axis=axis))


class MultiWorkerMirroredStrategy(Strategy):
    """Trains synchronously on the devices of several machines.

    Every worker runs the same program. The strategy must be created before JAX computes anything:
    it connects the processes.

    Args:
        cluster_resolver: Tells the cluster and which task this process is; by default TF_CONFIG,
            the variables of torchrun, JAX or Slurm are read, else this process is alone.
        communication_options: Hints for the collectives between workers.
        join_timeout_seconds: How long to wait for the other workers at the start.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        join_timeout_seconds: float = _JOIN_SECONDS,
    ) -> None:
        if join_timeout_seconds <= 0:
            raise ValueError(
                f"MultiWorkerMirroredStrategy: join_timeout_seconds={join_timeout_seconds} is not "
                "positive. Expected how long to wait for the other workers, in seconds."
            )
        self._resolver = resolve(cluster_resolver).resolver
        membership = join_cluster(self._resolver, join_timeout_seconds)
        # Also sizes the pool of XLA's CPU client before it starts.
        own = resolve_devices(None)
        devices = own if membership.num_workers == 1 else _all_like(own)
        super().__init__(MultiWorkerExtended(devices, membership, communication_options))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that told the cluster, or None when this process is alone."""
        return self._resolver


def _all_like(own: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """Returns the devices of all processes of the same kind, ordered by process."""
    found = jax.devices(own[0].platform)
    return tuple(sorted(found, key=lambda device: (device.process_index, device.id)))
