"""Keras losses in replicas.

In a user's own loop a mean over a replica's examples is divided by the number of replicas, as in
TensorFlow: gradients and losses are added up. In `fit` a replica's loss is weighted by its share of
the batch instead, which is exact for pieces of different sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distribax import context
from distribax.integrations.keras import shares


def count_replicas() -> int:
    """Returns the number of replicas that a loss of a user's own loop is divided by."""
    replica = context.get_replica_context()
    return 1 if replica is None or shares.current() is not None else replica.num_replicas_in_sync


def scale(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns Keras's function that scales the mean of a replica's losses."""

    @functools.wraps(original)
    def call(value: jax.Array) -> jax.Array:
        count = count_replicas()
        return value if count == 1 else value * (1.0 / count)

    return call


def unscale(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns Keras's function that takes back `scale`, for metrics of losses."""

    @functools.wraps(original)
    def call(value: jax.Array) -> jax.Array:
        count = count_replicas()
        return value if count == 1 else value * count

    return call


def reduce_in_replica(reduce_values: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras's function that reduces losses, for replicas.

    The loss of an empty piece is zero, and a sum stays a sum in `fit`.
    """

    @functools.wraps(reduce_values)
    def call(
        values: Any, sample_weight: Any = None, reduction: str | None = "sum_over_batch_size"
    ) -> Any:
        loss = reduce_values(values, sample_weight, reduction)
        if context.get_replica_context() is None or reduction in (None, "none"):
            return loss
        if loss.shape == (0,):
            # Keras leaves it as it is.
            loss = jnp.sum(loss)
        share = shares.current()
        if share is None or reduction != "sum":
            return loss
        # It is weighted by the share later, as all losses are; that of an empty piece is zero.
        weight = share.weight
        return loss / (weight if isinstance(weight, float) else jnp.where(weight, weight, 1))

    return call
