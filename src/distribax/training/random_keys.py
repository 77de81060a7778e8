"""Random keys that differ by replica, and repeat by seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from distribax import context, jax_private
from distribax.types import VariableAggregation, VariableSynchronization
from distribax.variables import Variable

Seed: TypeAlias = "int | jax.Array | np.ndarray | np.integer"
"""A number, or a key: a typed one of `jax.random.key`, or a raw one of `jax.random.PRNGKey`."""


def replica_key(seed: Seed, *data: int | jax.Array | np.integer | Variable) -> jax.Array:
    """Returns a random key of the replica's own: the same for the same seed, data and replica.

    Args:
        seed: A number, or a key.
        *data: Integers that make it another key, such as the number of the step.

    Returns:
        A key for the functions of `jax.random`; outside the replicas it is that of the first one.

    Raises:
        TypeError: `seed` is not an integer or a key.

    Example:
        >>> import distribax as dx, jax
        >>> first, second = dx.random.replica_key(7, 0), dx.random.replica_key(7, 1)
        >>> bool(jax.random.normal(first) == jax.random.normal(second))
        False
    """
    key = _make_key(seed)
    replica = context.get_replica_context()
    replica_id = 0 if replica is None else replica.replica_id_in_sync_group
    for number in (*data, replica_id):
        key = jax.random.fold_in(key, jnp.asarray(number).astype(jnp.uint32))
    return key


class Generator:
    """Random numbers that differ in each draw and in each replica, and repeat by seed.

    How often each replica has drawn is kept in a variable, so that it works inside `dx.function`,
    and `dx.Checkpoint(generator=generator)` saves it. Create it like other variables: once, and
    inside `with strategy.scope():` of the strategy whose replicas draw. On parameter servers,
    workers that draw at the same time may get the same numbers; use `replica_key` there.

    Args:
        seed: A number, or a key.
        name: The beginning of the names of its variables.

    Raises:
        TypeError: `seed` is not an integer or a key.

    Example:
        >>> import distribax as dx
        >>> generator = dx.random.Generator(0)
        >>> one, two = generator.normal((3,)), generator.normal((3,))
        >>> bool((one == two).any())
        False
    """

    def __init__(self, seed: Seed, name: str = "Generator") -> None:
        key = _make_key(seed)
        self._impl = jax.random.key_impl(key)
        self._key = Variable(jax.random.key_data(key), trainable=False, name=f"{name}/key")
        self._count = Variable(
            np.uint32(0),
            trainable=False,
            name=f"{name}/count",
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def variables(self) -> list[Variable]:
        """Its state: the key of the seed, and how often it has drawn."""
        return [self._key, self._count]

    def key(self) -> jax.Array:
        """Returns the next key.

        Returns:
            A key for the functions of `jax.random`, which no other draw or replica gets.
        """
        count = self._count.read_value()
        self._count.assign_add(jnp.ones((), jnp.uint32))
        return replica_key(jax.random.wrap_key_data(self._key.read_value(), impl=self._impl), count)

    def normal(
        self,
        shape: Sequence[int] = (),
        mean: jax.typing.ArrayLike = 0.0,
        stddev: jax.typing.ArrayLike = 1.0,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> jax.Array:
        """Returns numbers of a normal distribution.

        Args:
            shape: How many.
            mean: Their mean.
            stddev: Their standard deviation.
            dtype: Their data type.

        Returns:
            An array.
        """
        drawn = jax.random.normal(self.key(), tuple(shape), dtype) * stddev + mean
        return drawn.astype(dtype)

    def uniform(
        self,
        shape: Sequence[int] = (),
        minval: jax.typing.ArrayLike = 0,
        maxval: jax.typing.ArrayLike = 1,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> jax.Array:
        """Returns numbers of a uniform distribution.

        Args:
            shape: How many.
            minval: The smallest number.
            maxval: Where they end; it is not among them.
            dtype: Their data type, which may be one of integers.

        Returns:
            An array.
        """
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        draw = jax.random.randint if is_integer else jax.random.uniform
        return draw(self.key(), tuple(shape), minval=minval, maxval=maxval, dtype=dtype)


def _make_key(seed: Seed) -> jax.Array:
    if isinstance(seed, jax.Array) and jax_private.is_key(seed):
        return seed
    if not isinstance(seed, bool) and isinstance(seed, (int, np.integer, np.ndarray, jax.Array)):
        array = seed if isinstance(seed, (int, jax.Array)) else np.asarray(seed)
        is_integer = jnp.issubdtype(jnp.result_type(array), jnp.integer)
        if is_integer and np.ndim(array) == 0:
            return jax.random.key(array)
        if is_integer and np.ndim(array) == 1:
            return jax.random.wrap_key_data(jnp.asarray(array, jnp.uint32))
    raise TypeError(
        f"dx.random: seed={seed!r}. Expected an integer, or a key of jax.random.key or "
        "jax.random.PRNGKey."
    )
