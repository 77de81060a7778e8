"""Keras losses in replicas.

In a custom training loop a mean over a replica's examples is divided by the number of replicas, as
in TensorFlow: gradients and losses are added up. In `fit` a replica's loss is weighted by its share
of the batch instead, which is exact for pieces of different sizes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribax import context
from distribax.integrations.keras import shares
from distribax.integrations.keras.shares import ReplicaShare
from distribax.integrations.replacement import Function, replacement
from distribax.types import ReduceOp


def count_replicas() -> int:
    """Returns the number of replicas that losses in a custom training loop are divided by."""
    replica = context.get_replica_context()
    return 1 if replica is None or shares.current() is not None else replica.num_replicas_in_sync


@replacement
def scale(original: Function, value: jax.Array) -> jax.Array:
    """Scales the mean of a replica's losses."""
    count = count_replicas()
    return value if count == 1 else value * (1.0 / count)


@replacement
def unscale(original: Function, value: jax.Array) -> jax.Array:
    """Takes back `scale`, for metrics of losses."""
    count = count_replicas()
    return value if count == 1 else value * count


@replacement
def reduce_in_replica(
    reduce_values: Function,
    values: Any,
    sample_weight: Any = None,
    reduction: str | None = "sum_over_batch_size",
) -> Any:
    """Reduces losses in a replica.

    The loss of an empty piece is zero. In `fit` a sum stays a sum, and a mean by weights is that
    by the weights of all replicas.
    """
    loss = reduce_values(values, sample_weight, reduction)
    if context.get_replica_context() is None or reduction in (None, "none"):
        return loss
    if loss.shape == (0,):
        # Keras leaves it as it is.
        loss = jnp.sum(loss)
    share = shares.current()
    if share is None:
        return loss
    if reduction == "sum":
        return _divide(loss, share.weight)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        return loss * _compare(share, jnp.sum(sample_weight)).astype(loss.dtype)
    return loss


@replacement
def mask_together(
    apply_mask: Function, sample_weight: Any, mask: Any, dtype: Any, reduction: str | None
) -> Any:
    """Turns a mask into weights, in a replica.

    In `fit` a mean over the examples that a mask keeps is the mean over all of the global batch.
    """
    weights = apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
    share = shares.current()
    if share is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return weights
    return weights * _compare(share, jnp.sum(mask)).astype(weights.dtype)


def _compare(share: ReplicaShare, own: jax.Array) -> jax.Array:
    """Returns how a replica's part of what counts compares with its share of the examples."""
    replica = context.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return jnp.ones(())
    own = own.astype(jnp.float32)
    total: jax.Array = replica.all_reduce(ReduceOp.SUM, own)
    return _divide(_divide(own, total), share.weight)


def _divide(value: jax.Array, by: float | jax.Array) -> jax.Array:
    """Returns a quotient; zero divided by zero is zero."""
    return value / (by if isinstance(by, float) else jnp.where(by, by, 1))
