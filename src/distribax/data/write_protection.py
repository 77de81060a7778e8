"""Who may write to an array: elements are kept (cached, shuffled) while users work with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distribax.data import elements as nests
from distribax.data.elements import Element, Leaf

# JAX takes host memory that is aligned like this as it is, without another copy.
_ALIGNMENT = 64
_LARGE_BYTES = 64 * 1024
# As much may be copied once so that none of it is copied each time that it is used.
_MAX_MOVED_BYTES = 256 * 1024 * 1024


def make_empty_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns a new array without content; a large one in memory that devices need not copy."""
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or size < _LARGE_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def align_rows(element: Element) -> Element:
    """Returns the arrays with large rows aligned so that devices can use them without a copy.

    An array that is not aligned is copied, unless it is very large.
    """
    return nests.map_leaves(_align_rows, element)


def _align_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    row_bytes = array[:1].nbytes
    if (
        row_bytes < _LARGE_BYTES
        or row_bytes % _ALIGNMENT
        or array.nbytes > _MAX_MOVED_BYTES
        or not array.ctypes.data % _ALIGNMENT
        or array.dtype.hasobject
    ):
        return array
    copy = make_empty_array(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy


def make_read_only(element: Element) -> Element:
    """Returns views that a careless `x += 1` cannot write through."""
    return nests.map_leaves(_make_read_only, element)


def _make_read_only(leaf: Leaf) -> Leaf:
    if not isinstance(leaf, np.ndarray):
        return leaf
    view = leaf.view()
    view.flags.writeable = False
    return view


def copy_changeable(element: Element) -> Element:
    """Returns the element with its own copy of all arrays that somebody may still write to."""
    return nests.map_leaves(_copy_changeable, element)


def _copy_changeable(leaf: Leaf) -> Leaf:
    if not isinstance(leaf, np.ndarray) or not _can_change(leaf):
        return leaf
    copy = make_empty_array(leaf.shape, leaf.dtype)
    np.copyto(copy, leaf)
    return copy


def _can_change(array: np.ndarray[Any, Any]) -> bool:
    if array.flags.writeable:
        return True
    return isinstance(array.base, np.ndarray) and _can_change(array.base)
