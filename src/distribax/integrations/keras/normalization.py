"""Batch normalization with the statistics of all replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from distribax import context
from distribax.integrations.replacement import Function, replacement
from distribax.types import ReduceOp


@keras.saving.register_keras_serializable(package="distribax")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization with the statistics of the global batch, as on one device.

    `keras.layers.BatchNormalization` uses the statistics of each replica's own examples, as in
    TensorFlow, and takes `synchronized=True` with TensorFlow only.

    Args:
        **kwargs: The arguments of `keras.layers.BatchNormalization`.

    Example:
        >>> import distribax as dx
        >>> layer = dx.integrations.keras.SyncBatchNormalization(momentum=0.9)
        >>> layer.momentum
        0.9
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
        return _get_moments(inputs, mask, tuple(self._reduction_axes))


@replacement
def refuse_synchronized(create: Function, /, cls: type, *args: Any, **kwargs: Any) -> Any:
    """Creates a `BatchNormalization`; names our layer where Keras refuses its own."""
    if kwargs.get("synchronized"):
        raise ValueError(
            f"{cls.__name__}: synchronized=True works with TensorFlow only. For statistics of "
            "all replicas write dx.integrations.keras.SyncBatchNormalization() instead."
        )
    return create(cls, *args, **kwargs)


def _get_moments(inputs: Any, mask: Any, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance over the examples of all replicas."""
    weights = jnp.ones(inputs.shape[:-1], inputs.dtype)
    if mask is not None:
        weights = jnp.asarray(mask, inputs.dtype)
    weights = jnp.broadcast_to(weights[..., None], inputs.shape)
    count, total = _sum_over_replicas([jnp.sum(weights, axes), jnp.sum(inputs * weights, axes)])
    count = jnp.maximum(count, 1)
    mean = total / count
    shape = [1 if dim in axes else size for dim, size in enumerate(inputs.shape)]
    distances = jnp.square(inputs - mean.reshape(shape)) * weights
    (squares,) = _sum_over_replicas([jnp.sum(distances, axes)])
    return mean, squares / count


def _sum_over_replicas(values: list[jax.Array]) -> list[jax.Array]:
    replica = context.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return values
    added: list[jax.Array] = replica.all_reduce(ReduceOp.SUM, values)
    return added
