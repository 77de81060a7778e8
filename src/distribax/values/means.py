"""Means: a sum in a type that holds it, divided, in the type that the mean is to have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from distribax.values.layout import Global, Layout, Local, Padded


def find_dtype(layout: Layout) -> np.dtype[Any]:
    """Returns the data type of the replicas' values."""
    if isinstance(layout, (Global, Padded)):
        return layout.array.dtype
    return jnp.result_type(*([layout.value] if isinstance(layout, Local) else layout.pieces))


def find_sum_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns a type that holds the sum of many numbers of a type."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        # Exact, where it cannot overflow; the mean is a float in any case.
        by_size = {1: np.int32, 8: np.float64}
        return np.dtype(by_size.get(dtype.itemsize, np.float32))
    # bfloat16 has the range of float32; a sum of 16 bits more would double what is sent.
    if jnp.issubdtype(dtype, jnp.floating) and float(jnp.finfo(dtype).max) < 1e30:
        return np.dtype(np.float32)
    return dtype


def widen(value: ArrayLike) -> jax.Array:
    """Returns a value of a type that holds the sum over replicas whose mean is wanted."""
    array = jnp.asarray(value)
    return array.astype(find_sum_type(array.dtype))


def divide(total: jax.Array, count: ArrayLike, dtype: np.dtype[Any]) -> jax.Array:
    """Turns a sum into the mean of `count` values of a type; that of integers is a float."""
    mean = total / count
    return mean.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else mean
