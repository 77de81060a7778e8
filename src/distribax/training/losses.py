"""Losses that are right whatever the number of replicas."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from distribax import context
from distribax.values import divide, find_sum_type


def compute_average_loss(
    per_example_loss: jax.typing.ArrayLike,
    sample_weight: jax.typing.ArrayLike | None = None,
    global_batch_size: float | jax.Array | None = None,
) -> jax.Array:
    """Adds the examples' losses and divides by the global batch size.

    The replicas' results add up to the mean over the global batch, so gradients are to be summed.

    Args:
        per_example_loss: The losses of this replica's examples; the first dimension is the batch.
        sample_weight: Weights of the examples, or of parts of them, also as a column.
        global_batch_size: The number of examples over all replicas; this replica's times the
            number of replicas by default.

    Returns:
        A scalar; added up over the replicas it is the mean loss of the global batch.

    Raises:
        ValueError: The loss is a scalar, a weight does not fit, or the batch size is negative or
            not one number.
        RuntimeError: It is called outside a replica without `global_batch_size`.

    Example:
        >>> import distribax as dx, jax.numpy as jnp
        >>> float(dx.compute_average_loss(jnp.array([1.0, 2.0]), global_batch_size=4))
        0.75
    """
    loss = jnp.asarray(per_example_loss)
    if loss.ndim == 0:
        raise ValueError(
            "compute_average_loss: per_example_loss is a scalar. Pass one loss for each example, "
            "before any mean over the batch."
        )
    if sample_weight is not None:
        weight = jnp.asarray(sample_weight)
        if weight.ndim == loss.ndim + 1 and weight.shape[-1] == 1:
            weight = weight[..., 0]
        fits = weight.shape[:1] in ((), loss.shape[:1]) and weight.ndim <= loss.ndim
        if not fits or any(w not in (1, n) for w, n in zip(weight.shape, loss.shape, strict=False)):
            raise ValueError(
                f"compute_average_loss: sample_weight of shape {tuple(weight.shape)} does not fit "
                f"per_example_loss of shape {tuple(loss.shape)}. Expected one weight for each "
                f"example, shape {(loss.shape[0],)}, or a scalar."
            )
        loss = loss * weight.reshape(weight.shape + (1,) * (loss.ndim - weight.ndim))
    replicas = context.get_strategy().num_replicas_in_sync
    if global_batch_size is None:
        _require_replica("compute_average_loss")
        global_batch_size = loss.shape[0] * replicas
    elif isinstance(global_batch_size, (int, float)) and global_batch_size < 0:
        raise ValueError(
            f"compute_average_loss: global_batch_size={global_batch_size} is negative. Expected "
            "the number of examples over all replicas."
        )
    if jnp.ndim(global_batch_size) != 0:
        raise ValueError(
            "compute_average_loss: global_batch_size has the shape "
            f"{jnp.shape(global_batch_size)}. Expected one number, the examples over all replicas."
        )
    wide = find_sum_type(loss.dtype)
    # Not of the type of the loss, which may not hold the number: 257 is no bfloat16.
    size = jnp.asarray(global_batch_size, jnp.promote_types(wide, jnp.float32))
    # A batch without examples has no loss; 0 / 0 would poison the sum over replicas.
    mean = divide(jnp.sum(loss, dtype=wide), jnp.where(size == 0, 1, size), loss.dtype)
    return jnp.where(size == 0, jnp.zeros_like(mean), mean)


def scale_regularization_loss(regularization_loss: jax.typing.ArrayLike) -> jax.Array:
    """Divides a loss that every replica computes in full by the number of replicas.

    Args:
        regularization_loss: The loss, a scalar or losses to be added.

    Returns:
        A scalar; added up over the replicas it is the loss.

    Raises:
        RuntimeError: It is called outside a replica.

    Example:
        >>> import distribax as dx
        >>> float(dx.scale_regularization_loss(3.0))
        3.0
    """
    _require_replica("scale_regularization_loss")
    replicas = context.get_strategy().num_replicas_in_sync
    return jnp.sum(jnp.asarray(regularization_loss)) / replicas


def _require_replica(what: str) -> None:
    if context.in_cross_replica_context():
        raise RuntimeError(
            f"{what}: needs a replica, but was called in the cross-replica context. Call it in "
            "the function given to strategy.run()."
        )
