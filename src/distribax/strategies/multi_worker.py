"""Replicas on the devices of several machines, with mirrored variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from distribax import jax_private
from distribax.cluster import ClusterResolver, resolve
from distribax.cluster.peers.membership import (
    Membership,
    join_cluster,
    watch_joint_calls,
)
from distribax.collectives import (
    AllReduce,
    CommunicationImplementation,
    CommunicationOptions,
)
from distribax.errors import HostMode, HostOnly
from distribax.execution import frames
from distribax.strategies.mirrored import MirroredExtended
from distribax.strategies.strategy import Strategy
from distribax.topology import InputTarget, list_local_devices, resolve_devices
from distribax.types import ValueContext
from distribax.values import DistributedValues, Mirrored, Pieces


class MultiWorkerExtended(MirroredExtended):
    """Mirrored replicas over the devices of all workers' processes."""

    def __init__(
        self,
        devices: Sequence[jax.Device],
        membership: Membership,
        options: CommunicationOptions,
    ) -> None:
        ops = AllReduce()
        ops.default_options = options
        super().__init__(devices, ops)
        self._membership = membership
        assert self.mesh is not None
        self._local = list_local_devices(self.mesh)
        # What each worker is told of are its own devices.
        self._parameters = self._local

    @property
    @override
    def local_devices(self) -> tuple[jax.Device, ...]:
        return self._local

    @property
    @override
    def first_replica(self) -> int:
        return self._workers.index(self._local[0])

    @override
    def input_target(self) -> InputTarget:
        return InputTarget(
            self._local,
            self.mesh,
            self.num_replicas_in_sync,
            self._membership.num_workers,
            self._membership.worker_id,
        )

    @override
    def distribute_values(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        if frames.current() is not None:
            # A compiled function is one program for all workers, and these are one worker's values.
            raise HostOnly(
                "values of this worker's replicas are made in the function", HostMode.EAGER
            )
        return super().distribute_values(value_fn)

    @override
    def broadcast_to(self, tensor: jax.typing.ArrayLike, destinations: object = None) -> Any:
        if frames.current() is not None or destinations is not None:
            return super().broadcast_to(tensor, destinations)
        return Mirrored.of(Pieces(super().broadcast_to(tensor, self._local).values, self.mesh))

    @override
    def first_value(self, value: DistributedValues) -> Any:
        if frames.current() is not None:
            return super().first_value(value)
        first = jax_private.broadcast_from_first(np.asarray(value.values[0]))
        return self.broadcast_to(first)

    @override
    def gather_to(
        self,
        value: object,
        destinations: object,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        gathered = super().gather_to(value, destinations, axis, options)
        if frames.current() is not None or self._membership.num_workers == 1:
            return gathered
        local = np.asarray(gathered.get())
        parts = jax_private.gather_from_all(local, axis)
        return self.broadcast_to(np.concatenate(parts, axis=axis))


class MultiWorkerMirroredStrategy(Strategy):
    """Trains synchronously on the devices of several machines.

    Every worker runs the same program. The strategy must be created before JAX computes anything:
    it connects the processes.

    Args:
        cluster_resolver: Tells the cluster and which task this process is; by default TF_CONFIG,
            the variables of torchrun, JAX, GKE (for TPUs) or Slurm are read, else this process is
            alone.
        communication_options: Hints for the collectives between workers, used wherever a call
            gives none of its own.
        join_timeout_seconds: How long to wait for the other workers at the start; by default what
            DISTRIBAX_JOIN_TIMEOUT says, or 30. If the first worker gives up, all do.
        peer_timeout_seconds: After how much silence another worker counts as lost; by default what
            DISTRIBAX_PEER_TIMEOUT says, or 20. The first worker's value counts.

    Raises:
        TypeError: `communication_options` is not a `dx.CommunicationOptions`.
        ValueError: A time limit is not positive, or NCCL is asked for without GPUs.
        RuntimeError: JAX has started already, or the other workers did not come in time.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        join_timeout_seconds: float | None = None,
        peer_timeout_seconds: float | None = None,
    ) -> None:
        options = communication_options or CommunicationOptions()
        if not isinstance(options, CommunicationOptions):
            raise TypeError(
                f"MultiWorkerMirroredStrategy: communication_options={options!r} is not a "
                "dx.CommunicationOptions. Pass one, for example "
                "dx.CommunicationOptions(bytes_per_pack=50 * 1024 * 1024)."
            )
        self._resolver = resolve(cluster_resolver).resolver
        membership = join_cluster(self._resolver, join_timeout_seconds, peer_timeout_seconds)
        watch_joint_calls(options.timeout_seconds)
        # Also sizes the pool of XLA's CPU client before it starts.
        own = resolve_devices(None)
        devices = own if membership.num_workers == 1 else _list_devices_like(own)
        _check_implementation(options, devices)
        super().__init__(MultiWorkerExtended(devices, membership, options))

    @property
    @override
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that told the cluster, or None when this process is alone."""
        return self._resolver


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` with the arguments of TensorFlow's experimental one.

    Args:
        communication: Which library carries the bytes between workers.
        cluster_resolver: As for `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: `communication` is not known.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))


def _list_devices_like(own: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """Returns the devices of all processes of the same kind, ordered by process."""
    found = jax.devices(own[0].platform)
    return tuple(sorted(found, key=lambda device: (device.process_index, device.id)))


def _check_implementation(options: CommunicationOptions, devices: Sequence[jax.Device]) -> None:
    platform = devices[0].platform
    if options.implementation is CommunicationImplementation.NCCL and platform != "gpu":
        raise ValueError(
            "MultiWorkerMirroredStrategy: communication_options asks for "
            f"implementation=NCCL, which works between GPUs, but the devices are {platform!r}. "
            "Leave it out: AUTO takes what the platform has."
        )
