"""Who may write to an array: elements are kept (cached, shuffled, prefetched) while users go on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distribax.data import elements as nests
from distribax.data.elements import Element

# JAX takes host memory that is aligned like this as it is, without another copy.
_ALIGNMENT = 64
_LARGE_BYTES = 64 * 1024
# As much may be copied once so that none of it is copied each time that it is used.
_MAX_MOVED_BYTES = 256 * 1024 * 1024


def empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns a new array without content; a large one in memory that devices can use as it is."""
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or size < _LARGE_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def with_usable_rows(element: Element) -> Element:
    """Returns the arrays with rows that devices can use as they are, if they are large.

    An array that has others is copied, unless it is very large.
    """
    return nests.map_leaves(_with_usable_rows, element)


def _with_usable_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    row_bytes = array[:1].nbytes
    if (
        row_bytes < _LARGE_BYTES
        or row_bytes % _ALIGNMENT
        or array.nbytes > _MAX_MOVED_BYTES
        or not array.ctypes.data % _ALIGNMENT
        or array.dtype.hasobject
    ):
        return array
    copy = empty_array(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def read_only(element: Element) -> Element:
    """Returns views that a careless `x += 1` cannot write through."""
    return nests.map_leaves(_read_only, element)


def _read_only(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    view = leaf.view()
    view.flags.writeable = False
    return view


def owned(element: Element) -> Element:
    """Returns the element in memory of its own, for a user may fill the same array again."""
    return nests.map_leaves(_owned, element)


def _owned(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray) or not _can_change(leaf):
        return leaf
    copy = empty_array(leaf.shape, leaf.dtype)
    np.copyto(copy, leaf)
    return copy


def _can_change(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return True
        array = array.base
    return False
