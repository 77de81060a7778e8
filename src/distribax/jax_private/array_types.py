"""Array types: classes whose objects JAX takes where it takes arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes

_T = TypeVar("_T")


def register_array_type(
    cls: type[_T], read: Callable[[_T], jax.Array], describe: Callable[[_T], Any]
) -> None:
    """Lets JAX take objects of a class, and of classes derived from it, as arrays.

    They stay leaves of nests, as arrays are: `jax.tree.map` hands them to its function as they are.

    Args:
        cls: The class.
        read: Returns the array that an object stands for; called when JAX computes with it.
        describe: Returns the type of that array (`jax.typeof`), if possible without reading it.
    """
    _core.pytype_aval_mappings[cls] = describe
    _dtypes.register_canonicalize_value_handler(cls, read)


def make_array_type(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Returns what `jax.typeof` returns for an array of this shape and data type."""
    return _core.ShapedArray(shape, dtype)
