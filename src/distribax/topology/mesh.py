"""The mesh of a strategy's replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

REPLICA_AXIS: Final = "replica"
"""The name of the mesh axis of the replicas."""


def list_local_devices(mesh: Mesh) -> tuple[jax.Device, ...]:
    """Returns the devices of `mesh` that belong to this process, in the order of the replicas."""
    here = jax.process_index()
    return tuple(device for device in mesh.devices.flat if device.process_index == here)


def has_cpus_of_several_processes(mesh: Mesh) -> bool:
    """Returns whether the devices are CPUs of several processes: then Gloo runs the collectives."""
    return bool(mesh.is_multi_process) and mesh.devices.flat[0].platform == "cpu"


def make_replica_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh with one axis, `replica`, with one device for each replica.

    >>> make_replica_mesh(jax.devices()[:1]).axis_names
    ('replica',)
    """
    if not devices:
        raise ValueError(
            "devices=[] has no device. A mesh needs at least one, and one for each replica."
        )
    # The order is the user's: replica i runs on devices[i]. jax.make_mesh might reorder.
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return Mesh(grid, (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
