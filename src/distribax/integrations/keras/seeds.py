"""Random numbers that differ between replicas, and repeat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras

from distribax import context
from distribax.integrations import replica_state
from distribax.integrations.keras import variables
from distribax.integrations.replacement import Function, replacement

_STRIDE = 0x9E3779B9
"""Odd, so that all replicas have different numbers; as dense as the golden ratio."""


@replacement
def draw_own(
    draw: Function, generator: keras.random.SeedGenerator, ordered: bool = True
) -> jax.Array:
    """Draws the next seed of a generator: another one in each replica but the first."""
    seed: jax.Array = draw(generator, ordered)
    replica = context.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return seed
    if replica_state.current() is not None:
        variables.mark_same(generator.state)
    number = jnp.asarray(replica.replica_id_in_sync_group).astype(seed.dtype)
    return seed.at[0].set(seed[0] ^ (number * jnp.asarray(_STRIDE, seed.dtype)))
