"""Replicas on the TPU cores of one machine or of a slice."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from distribax.cluster import list_training_tasks
from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.strategies.mirrored import MirroredStrategy


class TPUStrategy(MirroredStrategy):
    """A `MirroredStrategy` over the TPU devices of this process.

    Args:
        tpu_cluster_resolver: The resolver; JAX finds the devices by itself, but only those of this
            machine.
        experimental_device_assignment: The devices to use, as a list of `jax.Device`s; all TPU
            devices by default.

    Raises:
        RuntimeError: There is no TPU on this machine, or the resolver knows several machines.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: Sequence[jax.Device] | None = None,
    ) -> None:
        if tpu_cluster_resolver is not None:
            _require_one_machine(tpu_cluster_resolver)
        super().__init__(experimental_device_assignment or _find_tpus())


def _require_one_machine(resolver: ClusterResolver) -> None:
    machines = len(list_training_tasks(resolver.cluster_spec()))
    if machines > 1:
        raise RuntimeError(
            f"TPUStrategy: the cluster has {machines} machines, and this strategy uses the TPUs of "
            "one: each would train by itself. Run the program on all of them, with "
            "dx.MultiWorkerMirroredStrategy(resolver)."
        )


def _find_tpus() -> list[jax.Device]:
    try:
        return jax.local_devices(backend="tpu")
    except RuntimeError as error:
        raise RuntimeError(
            "TPUStrategy: JAX finds no TPU on this machine. Is it installed for TPUs (pip install "
            "'jax[tpu]')? On GPUs or CPUs use dx.MirroredStrategy()."
        ) from error
