"""Replicas on the TPU cores of one machine or of a slice."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from distribax.cluster.resolvers.resolver import ClusterResolver
from distribax.strategies.mirrored import MirroredStrategy


class TPUStrategy(MirroredStrategy):
    """A `MirroredStrategy` over the TPU devices of this process.

    Args:
        tpu_cluster_resolver: Accepted as in TensorFlow; JAX finds the devices by itself.
        experimental_device_assignment: The devices to use, as a list of `jax.Device`s; all TPU
            devices by default.

    Raises:
        RuntimeError: There is no TPU on this machine.
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: Sequence[jax.Device] | None = None,
    ) -> None:
        super().__init__(experimental_device_assignment or _find_tpus())


def _find_tpus() -> list[jax.Device]:
    try:
        return jax.local_devices(backend="tpu")
    except RuntimeError as error:
        raise RuntimeError(
            "TPUStrategy: JAX finds no TPU on this machine. Is it installed for TPUs (pip install "
            "'jax[tpu]')? On GPUs or CPUs use dx.MirroredStrategy()."
        ) from error
