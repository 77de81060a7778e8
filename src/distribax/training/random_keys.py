"""Random keys that differ by replica, and repeat by seed."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Self, TypeAlias

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

    @classmethod
    def from_seed(cls, seed: Seed) -> Self:
        """Returns a generator: the same as `Generator(seed)`.

        Args:
            seed: A number, or a key.

        Returns:
            A new generator.

        Raises:
            TypeError: `seed` is not an integer or a key.
        """
        return cls(seed)

    @classmethod
    def from_non_deterministic_state(cls) -> Self:
        """Returns a generator whose numbers do not repeat in another run of the program."""
        return cls(jax.random.fold_in(jax.random.key(secrets.randbits(32)), secrets.randbits(32)))

    @classmethod
    def from_state(cls, state: jax.typing.ArrayLike) -> Self:
        """Returns a generator that goes on where another one was.

        Args:
            state: The other one's `state`.

        Returns:
            A new generator.

        Raises:
            ValueError: `state` is not the state of a generator.
        """
        generator = cls(0)
        generator.reset(state)
        return generator

    @property
    def variables(self) -> list[Variable]:
        """Its variables: the key of the seed, and how often it has drawn."""
        return [self._key, self._count]

    @property
    def state(self) -> jax.Array:
        """What it will draw, for `reset` and `from_state`: how often it has drawn, and its key."""
        count = self._count.read_value().reshape(1)
        return jnp.concatenate([count, self._key.read_value()])

    def reset(self, state: jax.typing.ArrayLike) -> None:
        """Goes on where it, or another generator, was; call it outside the replicas.

        Args:
            state: The `state` that it had there.

        Raises:
            ValueError: `state` is not the state of such a generator.
        """
        given = jnp.asarray(state)
        expected = (1 + self._key.shape[0],)
        if given.shape != expected or given.dtype != jnp.uint32:
            raise ValueError(
                f"dx.random.Generator: a state of shape {given.shape} and data type {given.dtype} "
                f"was given. Expected generator.state, an array of shape {expected} and uint32."
            )
        self._count.assign(given[0])
        self._key.assign(given[1:])

    def reset_from_seed(self, seed: Seed) -> None:
        """Begins again, as a new generator does; call it outside the replicas.

        Args:
            seed: A number, or a key.

        Raises:
            TypeError: `seed` is not an integer or a key.
            ValueError: `seed` is a key of another kind than the generator's.
        """
        self.reset(jnp.append(jnp.uint32(0), jax.random.key_data(_make_key(seed))))

    def skip(self, delta: int | jax.Array) -> None:
        """Passes over draws.

        Args:
            delta: How many.
        """
        self._count.assign_add(jnp.asarray(delta).astype(jnp.uint32))

    def split(self, count: int = 1) -> list[Generator]:
        """Returns new generators, which draw other numbers than this one and than each other.

        Call it where variables are created: inside `with strategy.scope():`.

        Args:
            count: How many.

        Returns:
            As many generators.
        """
        return [Generator(key) for key in self.make_seeds(count)]

    def make_seeds(self, count: int = 1) -> jax.Array:
        """Returns keys for the functions of `jax.random`, and for `Generator`.

        Args:
            count: How many.

        Returns:
            An array of keys, which no other draw or replica gets.
        """
        return jax.random.split(self.key(), count)

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

    def truncated_normal(
        self,
        shape: Sequence[int] = (),
        mean: jax.typing.ArrayLike = 0.0,
        stddev: jax.typing.ArrayLike = 1.0,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> jax.Array:
        """Returns numbers of a normal distribution, none further than `2 * stddev` from the mean.

        Args:
            shape: How many.
            mean: Their mean.
            stddev: The standard deviation of the whole distribution.
            dtype: Their data type.

        Returns:
            An array.
        """
        drawn = jax.random.truncated_normal(self.key(), -2, 2, tuple(shape), dtype)
        return (drawn * stddev + mean).astype(dtype)

    def binomial(
        self,
        shape: Sequence[int],
        counts: jax.typing.ArrayLike,
        probs: jax.typing.ArrayLike,
        dtype: jax.typing.DTypeLike = jnp.int32,
    ) -> jax.Array:
        """Returns how many of some trials succeed.

        Args:
            shape: How many numbers; `counts` and `probs` must broadcast to it.
            counts: The numbers of trials.
            probs: The probabilities of success.
            dtype: Their data type.

        Returns:
            An array.
        """
        return jax.random.binomial(self.key(), counts, probs, tuple(shape)).astype(dtype)

    def uniform(
        self,
        shape: Sequence[int] = (),
        minval: jax.typing.ArrayLike = 0,
        maxval: jax.typing.ArrayLike | None = None,
        dtype: jax.typing.DTypeLike = jnp.float32,
    ) -> jax.Array:
        """Returns numbers of a uniform distribution.

        Args:
            shape: How many.
            minval: The smallest number.
            maxval: Where they end; it is not among them. None is 1, but integers need it.
            dtype: Their data type, which may be one of integers.

        Returns:
            An array.

        Raises:
            ValueError: Integers are to be drawn, and `maxval` is None.
        """
        if not jnp.issubdtype(dtype, jnp.integer):
            end = 1 if maxval is None else maxval
            return jax.random.uniform(self.key(), tuple(shape), dtype, minval, end)
        if maxval is None:
            raise ValueError(
                f"dx.random.Generator.uniform: dtype={jnp.dtype(dtype)} needs maxval. Pass the end "
                "of the range, or call uniform_full_int(shape, dtype)."
            )
        return jax.random.randint(self.key(), tuple(shape), minval, maxval, dtype)

    def uniform_full_int(
        self, shape: Sequence[int] = (), dtype: jax.typing.DTypeLike = jnp.uint32
    ) -> jax.Array:
        """Returns integers that are spread evenly over all those of their data type.

        Args:
            shape: How many.
            dtype: Their data type.

        Returns:
            An array.
        """
        bits = jax.random.bits(self.key(), tuple(shape), f"uint{8 * jnp.dtype(dtype).itemsize}")
        return jax.lax.bitcast_convert_type(bits, dtype)


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
