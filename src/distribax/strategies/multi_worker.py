"""Replicas on the devices of several machines, with mirrored variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from distribax import jax_private
from distribax.cluster import ClusterResolver, resolve
from distribax.cluster.peers.membership import Membership, join_cluster
from distribax.collectives import AllReduce, CommunicationOptions
from distribax.errors import HostOnly, explaining, raise_if_lost
from distribax.execution import frames
from distribax.strategies.mirrored import MirroredExtended
from distribax.strategies.strategy import Strategy
from distribax.topology import InputTarget, device_name, local_devices, resolve_devices
from distribax.types import Args, Kwargs, Nest, ReduceOp, RunOptions, StepFn, ValueContext
from distribax.values import DistributedValues, Mirrored, Pieces

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
        # What each worker is told of are its own devices.
        self._parameters = self._local

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

    def distribute_values(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        if frames.current() is not None:
            # A compiled function is one program for all workers, and these are one worker's values.
            raise HostOnly("values of this worker's replicas are made in the function", "eager")
        return super().distribute_values(value_fn)

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        if frames.current() is not None or destinations is not None:
            return super().broadcast_to(tensor, destinations)
        return Mirrored.of(Pieces(super().broadcast_to(tensor, self._local).values, self.mesh))

    def first_value(self, value: DistributedValues, destinations: Any) -> Any:
        if frames.current() is not None:
            return super().first_value(value, destinations)
        first = jax_private.broadcast_from_first(np.asarray(value.values[0]))
        return self.broadcast_to(first)

    def gather_to(
        self, value: Any, destinations: Any, axis: int, options: CommunicationOptions | None = None
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
            the variables of torchrun, JAX or Slurm are read, else this process is alone.
        communication_options: Hints for the collectives between workers.
        join_timeout_seconds: How long to wait for the other workers at the start.
        peer_timeout_seconds: After how much silence of another worker `dx.PeerLostError` is raised;
            by default what DISTRIBAX_PEER_TIMEOUT says, or 20. The first worker's value counts.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        join_timeout_seconds: float = _JOIN_SECONDS,
        peer_timeout_seconds: float | None = None,
    ) -> None:
        if join_timeout_seconds <= 0:
            raise ValueError(
                f"MultiWorkerMirroredStrategy: join_timeout_seconds={join_timeout_seconds} is not "
                "positive. Expected how long to wait for the other workers, in seconds."
            )
        self._resolver = resolve(cluster_resolver).resolver
        membership = join_cluster(self._resolver, join_timeout_seconds, peer_timeout_seconds)
        # Also sizes the pool of XLA's CPU client before it starts.
        own = explaining(resolve_devices)(None)
        if membership.session is not None:
            membership.session.backend_started()
        devices = own if membership.num_workers == 1 else _all_like(own)
        super().__init__(MultiWorkerExtended(devices, membership, communication_options))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that told the cluster, or None when this process is alone."""
        return self._resolver

    # A worker that is lost makes these fail; the error says which one.

    @explaining
    def run(
        self,
        fn: StepFn,
        args: Args = (),
        kwargs: Kwargs | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        raise_if_lost()
        return super().run(fn, args, kwargs, options)

    @explaining
    def reduce(self, reduce_op: ReduceOp | str, value: Nest, axis: int | None = None) -> Nest:
        raise_if_lost()
        return super().reduce(reduce_op, value, axis)

    @explaining
    def gather(self, value: Nest, axis: int) -> Nest:
        raise_if_lost()
        return super().gather(value, axis)


def _all_like(own: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """Returns the devices of all processes of the same kind, ordered by process."""
    found = jax.devices(own[0].platform)
    return tuple(sorted(found, key=lambda device: (device.process_index, device.id)))
