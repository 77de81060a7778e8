"""Adding the values of two processes: each sends its own to the other, and both add."""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from distribax.topology import REPLICA_AXIS, has_cpus_of_several_processes

_MAX_BYTES: Final = 4 << 20
"""In bytes: more does not fit into the buffers of a connection."""


def can_exchange(value: jax.Array, mesh: Mesh) -> bool:
    """Tells whether values are better exchanged than given to the platform's all-reduce.

    Gloo's all-reduce goes round a ring twice, in segments. Between two devices it moves as many
    bytes as one exchange does, with several times as many messages to wait for.
    """
    small = value.size * value.dtype.itemsize <= _MAX_BYTES
    return small and mesh.size == 2 and has_cpus_of_several_processes(mesh)


def sum_by_exchange(value: jax.Array) -> jax.Array:
    """Adds both replicas' values of a tensor inside an SPMD program."""
    # As lax.psum does it: the sum of two truths is a number.
    own = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
    # Both add what was sent, their own part included: computed once more inside the addition, as
    # the compiler would do it, their own part could differ in the last bit from what was sent. What
    # goes to oneself is copied, and the compiler cannot look through that.
    kept = lax.ppermute(own, REPLICA_AXIS, [(0, 0), (1, 1)])
    return kept + lax.ppermute(own, REPLICA_AXIS, [(0, 1), (1, 0)])
