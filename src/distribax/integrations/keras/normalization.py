"""Batch normalization with the statistics of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from distribax import context
from distribax.types import ReduceOp


@keras.saving.register_keras_serializable(package="distribax")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalization with the statistics of the global batch, as on one device.

    `keras.layers.BatchNormalization(synchronized=True)` under another name; the layer without the
    argument uses the statistics of each replica's own examples, as in TensorFlow.

    Args:
        **kwargs: The arguments of `keras.layers.BatchNormalization`, but `synchronized`.

    Example:
        >>> import distribax as dx
        >>> layer = dx.integrations.keras.SyncBatchNormalization(momentum=0.9)
        >>> layer.synchronized
        True
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**(kwargs | {"synchronized": True}))


def synchronize(moments: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `BatchNormalization._moments`, which adds up over replicas if that is asked for."""

    @functools.wraps(moments)
    def call(layer: keras.layers.BatchNormalization, inputs: Any, mask: Any) -> Any:
        if not layer.synchronized:
            return moments(layer, inputs, mask)
        return _get_moments(inputs, mask, tuple(layer._reduction_axes))

    return call


def _get_moments(inputs: Any, mask: Any, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance over the examples of all replicas."""
    weights = jnp.ones(inputs.shape[:-1], inputs.dtype)
    if mask is not None:
        weights = jnp.asarray(mask, inputs.dtype)
    weights = jnp.broadcast_to(weights[..., None], inputs.shape)
    count, total = _add_up([jnp.sum(weights, axes), jnp.sum(inputs * weights, axes)])
    count = jnp.maximum(count, 1)
    mean = total / count
    shape = [1 if dim in axes else size for dim, size in enumerate(inputs.shape)]
    distances = jnp.square(inputs - mean.reshape(shape)) * weights
    (squares,) = _add_up([jnp.sum(distances, axes)])
    return mean, squares / count


def _add_up(values: list[jax.Array]) -> list[jax.Array]:
    replica = context.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return values
    added: list[jax.Array] = replica.all_reduce(ReduceOp.SUM, values)
    return added
