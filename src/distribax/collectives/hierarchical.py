"""An all-reduce in two levels: within groups of neighbouring devices, then between the groups."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from typing_extensions import override

from distribax import jax_private
from distribax.collectives.all_reduce import AllReduce
from distribax.topology import REPLICA_AXIS


class HierarchicalCopyAllReduce(AllReduce):
    """Adds within groups of devices first, then between groups, then copies the sum to all.

    It is faster where devices are close within a group and far between groups. Each device of a
    group carries one part of the tensor, so no device carries all of it.
    """

    @override
    def sum_in_program(self, values: list[jax.Array], mesh: Mesh) -> list[jax.Array]:
        return [_sum_in_levels(value, mesh) for value in values]


def _sum_in_levels(value: jax.Array, mesh: Mesh) -> jax.Array:
    if value.dtype == jnp.bool_:
        # Counted, as `lax.psum` does.
        value = value.astype(jnp.int32)
    size = choose_group_size(mesh.size)
    near = [[first + k for k in range(size)] for first in range(0, mesh.size, size)]
    far = [[first + k for first in range(0, mesh.size, size)] for k in range(size)]
    flat = jnp.ravel(value)
    padded = jnp.pad(flat, (0, -flat.size % size))
    part = lax.psum_scatter(padded, REPLICA_AXIS, axis_index_groups=near, tiled=True)
    if len(near) > 1:
        part = lax.all_gather(part, REPLICA_AXIS, axis_index_groups=far).sum(axis=0)
    # Every group now has all parts; those of the first group make the whole.
    whole = jax_private.all_gather_same(part, REPLICA_AXIS)[:size]
    return whole.reshape(-1)[: flat.size].reshape(jnp.shape(value)).astype(value.dtype)


def choose_group_size(num_devices: int) -> int:
    """Returns how many devices form a group: about the square root, or all if none divides."""
    for size in range(math.isqrt(num_devices), 1, -1):
        if num_devices % size == 0:
            return num_devices // size
    return num_devices
