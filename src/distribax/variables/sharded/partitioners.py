"""Partitioners: into how many shards a large variable is divided."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from typing_extensions import override

from distribax.types import is_integer


class Partitioner:
    """Says into how many shards a variable is divided; subclass it for a rule of your own.

    `ParameterServerStrategy(variable_partitioner=...)` asks it for each variable. It divides
    variables along their first dimension, so the other numbers must be 1.
    """

    def __call__(
        self, shape: Sequence[int], dtype: jax.typing.DTypeLike, axis: int = 0
    ) -> list[int]:
        """Returns the number of parts along each dimension.

        Args:
            shape: The variable's shape.
            dtype: Its data type.
            axis: The dimension to divide.

        Returns:
            A number for each dimension: 1 for all but `axis`.

        Raises:
            NotImplementedError: A subclass does not define it.
            ValueError: `shape` or `axis` is not one of a variable.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a Partitioner has a method __call__(self, shape, dtype, "
            "axis=0) that returns the number of parts along each dimension."
        )


@dataclass(frozen=True)
class FixedShardsPartitioner(Partitioner):
    """Divides every variable into the same number of shards, as far as it has so many rows.

    Args:
        num_shards: The number of shards.

    Example:
        >>> from distribax import partitioners
        >>> partitioner = partitioners.FixedShardsPartitioner(num_shards=2)
        >>> partitioner((10, 3), "float32", axis=0)
        [2, 1]
        >>> partitioner((10, 3), "float32", axis=1)
        [1, 2]
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_positive(self, "num_shards")

    @override
    def __call__(
        self, shape: Sequence[int], dtype: jax.typing.DTypeLike, axis: int = 0
    ) -> list[int]:
        return _divide_along(*_check(shape, axis), self.num_shards)


@dataclass(frozen=True)
class MinSizePartitioner(Partitioner):
    """Divides a variable into as many shards as it can without making them too small.

    Args:
        min_shard_bytes: The size that a shard has at least.
        max_shards: The largest number of shards.
        bytes_per_string: What a string counts for, in variables of strings.

    Example:
        >>> from distribax import partitioners
        >>> partitioners.MinSizePartitioner(min_shard_bytes=24, max_shards=4)((10, 3), "float32")
        [4, 1]
        >>> partitioners.MinSizePartitioner(min_shard_bytes=24, max_shards=8)((10, 3), "float32")
        [5, 1]
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _require_positive(self, "min_shard_bytes", "max_shards", "bytes_per_string")

    @override
    def __call__(
        self, shape: Sequence[int], dtype: jax.typing.DTypeLike, axis: int = 0
    ) -> list[int]:
        shape, axis = _check(shape, axis)
        nbytes = math.prod(shape) * _count_element_bytes(dtype, self.bytes_per_string)
        shards = math.ceil(nbytes / self.min_shard_bytes)
        return _divide_along(shape, axis, min(self.max_shards, shards))


@dataclass(frozen=True)
class MaxSizePartitioner(Partitioner):
    """Divides a variable into as few shards as it can without making them too large.

    Args:
        max_shard_bytes: The size that a shard has at most; one row is the least that it holds.
        max_shards: The largest number of shards, even if they become larger then; None for any.
        bytes_per_string: What a string counts for, in variables of strings.

    Example:
        >>> from distribax import partitioners
        >>> partitioners.MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
        [6, 1]
        >>> partitioners.MaxSizePartitioner(max_shard_bytes=4, max_shards=2)((6, 1), "float32")
        [2, 1]
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _require_positive(self, "max_shard_bytes", "bytes_per_string")
        if self.max_shards is not None:
            _require_positive(self, "max_shards")

    @override
    def __call__(
        self, shape: Sequence[int], dtype: jax.typing.DTypeLike, axis: int = 0
    ) -> list[int]:
        shape, axis = _check(shape, axis)
        rows = shape[axis]
        nbytes = math.prod(shape) * _count_element_bytes(dtype, self.bytes_per_string)
        if nbytes == 0:
            return _divide_along(shape, axis, 1)
        rows_per_shard = max(1, self.max_shard_bytes * rows // nbytes)
        shards = math.ceil(rows / rows_per_shard)
        return _divide_along(shape, axis, min(shards, self.max_shards or shards))


def _divide_along(shape: Sequence[int], axis: int, shards: int) -> list[int]:
    parts = [1] * len(shape)
    parts[axis] = max(1, min(shards, shape[axis]))
    return parts


def _check(shape: Sequence[int], axis: int) -> tuple[tuple[int, ...], int]:
    """Returns the shape as a tuple, and the axis counted from the front."""
    try:
        shape = tuple(map(operator.index, shape))
    except TypeError:
        fits = False
    else:
        fits = all(size >= 0 for size in shape)
    if not fits:
        raise ValueError(
            f"partitioner: shape={shape!r}. Expected a tuple of whole numbers, none of them "
            "unknown (None) or negative."
        )
    if not is_integer(axis):
        raise ValueError(f"partitioner: axis={axis!r}. Expected the number of a dimension.")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"partitioner: axis={axis}, but shape={shape} has {len(shape)} dimension(s). "
            "Name one of them; a scalar cannot be divided."
        )
    return tuple(shape), int(axis) % len(shape)


def _count_element_bytes(dtype: jax.typing.DTypeLike, bytes_per_string: int) -> int:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(
            f"partitioner: dtype={dtype!r} is not a data type, such as jnp.float32 or 'float32'."
        ) from error
    return bytes_per_string if kind.kind in "SUO" else kind.itemsize


def _require_positive(partitioner: Partitioner, *names: str) -> None:
    for name in names:
        value = getattr(partitioner, name)
        if not is_integer(value) or value < 1:
            raise ValueError(
                f"{type(partitioner).__name__}: {name}={value!r}. Expected a number of at least 1."
            )
