"""Who may write to an array: elements are kept (cached, shuffled) while users work with them."""

from __future__ import annotations

from typing import Any

import numpy as np

from distribax.data import elements
from distribax.data.elements import Element, Leaf
from distribax.topology.host_memory import ALIGNMENT, LARGE_BYTES, copy_aligned, find_address

# As much may be copied once so that none of it is copied each time that it is used.
_MAX_MOVED_BYTES = 256 * 1024 * 1024


def align_rows(element: Element) -> Element:
    """Returns the arrays with large rows aligned so that devices can use them without a copy.

    An array that is not aligned is copied, unless it is very large.
    """
    return elements.map_leaves(_align_rows, element)


def _align_rows(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    row_bytes = array[:1].nbytes
    if (
        row_bytes < LARGE_BYTES
        or row_bytes % ALIGNMENT
        or array.nbytes > _MAX_MOVED_BYTES
        or find_address(array) % ALIGNMENT == 0
        or array.dtype.hasobject
    ):
        return array
    return copy_aligned(array)


def make_read_only(element: Element) -> Element:
    """Returns views that a careless `x += 1` cannot write through."""
    return elements.map_leaves(_make_read_only, element)


def _make_read_only(leaf: Leaf) -> Leaf:
    if not isinstance(leaf, np.ndarray):
        return leaf
    view = leaf.view()
    view.flags.writeable = False
    return view


def copy_changeable(element: Element) -> Element:
    """Returns the element with its own copy of all arrays that somebody may still write to."""
    return elements.map_leaves(_copy_changeable, element)


def keep_as_given(element: Element) -> Element:
    """Returns arrays that stay as they are now, even if the user changes those that were given.

    What can change is copied, once; a file that is mapped into memory is not: it may be larger than
    the memory.
    """
    return make_read_only(elements.map_leaves(_copy_unless_mapped, element))


def _copy_unless_mapped(leaf: Leaf) -> Leaf:
    return leaf if _is_mapped(leaf) else _copy_changeable(leaf)


def _is_mapped(leaf: object) -> bool:
    while isinstance(leaf, np.ndarray):
        if isinstance(leaf, np.memmap):
            return True
        leaf = leaf.base
    return False


def _copy_changeable(leaf: Leaf) -> Leaf:
    if not isinstance(leaf, np.ndarray) or not _can_change(leaf):
        return leaf
    if 0 not in leaf.strides:
        return copy_aligned(leaf)
    # What a broadcast repeats is copied once.
    once = leaf[tuple(slice(None, None if stride else 1) for stride in leaf.strides)]
    return np.broadcast_to(copy_aligned(once), leaf.shape)


def _can_change(array: np.ndarray[Any, Any]) -> bool:
    if array.flags.writeable:
        return True
    return isinstance(array.base, np.ndarray) and _can_change(array.base)
