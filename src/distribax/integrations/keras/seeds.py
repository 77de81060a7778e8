"""Random numbers that differ between replicas, and repeat."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import keras

from distribax import context
from distribax.integrations import replica_state
from distribax.integrations.keras import variables

_STRIDE = 0x9E3779B9
"""Odd, so that all replicas have different numbers; as dense as the golden ratio."""


def draw_own(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `SeedGenerator.next`, which draws another seed in each replica but the first."""

    @functools.wraps(draw)
    def call(generator: keras.random.SeedGenerator, ordered: bool = True) -> jax.Array:
        seed = draw(generator, ordered)
        replica = context.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return seed
        if replica_state.current() is not None:
            variables.mark_same(generator.state)
        number = jnp.asarray(replica.replica_id_in_sync_group).astype(seed.dtype)
        return seed.at[0].set(seed[0] ^ (number * jnp.asarray(_STRIDE, seed.dtype)))

    return call
