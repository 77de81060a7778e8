"""What counts as a leaf when a nest of values is flattened, and questions about such leaves.

A module of another library may be a pytree. Flattened and put together again it would be a copy,
and what a replica writes to a copy is lost. Such objects are opaque: passed on as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from typing_extensions import TypeIs

from distribax.values.distributed import DistributedValues
from distribax.values.indexed_slices import IndexedSlices
from distribax.values.layout import is_host_value

_opaque_types: tuple[type, ...] = ()


def make_opaque(*types: type) -> None:
    """Passes objects of these types, and of types derived from them, on as they are."""
    global _opaque_types
    _opaque_types = tuple(dict.fromkeys((*_opaque_types, *types)))


def get_opaque_test() -> Callable[[object], bool] | None:
    """Returns `is_opaque`, or None as long as nothing is."""
    return is_opaque if _opaque_types else None


def is_opaque(leaf: object) -> bool:
    """Tells whether `leaf` is passed on as it is, although JAX could flatten it."""
    return isinstance(leaf, _opaque_types)


def is_wrapped(leaf: object) -> TypeIs[DistributedValues]:
    """Tells whether `leaf` holds a value for each replica."""
    # By class: variables with copies count as `DistributedValues` too, but are no such wrappers.
    return issubclass(type(leaf), DistributedValues)


def is_wrapped_or_opaque(leaf: object) -> bool:
    """Tells whether `leaf` is a unit of a replica's arguments."""
    return is_wrapped(leaf) or is_opaque(leaf)


def is_slices(leaf: object) -> TypeIs[IndexedSlices]:
    """Tells whether `leaf` is some rows with their numbers, which are combined as one value."""
    return isinstance(leaf, IndexedSlices)


def is_wrapped_or_slices(leaf: object) -> bool:
    """Tells whether `leaf` is a unit of what is combined over replicas."""
    return is_wrapped(leaf) or is_slices(leaf)


def is_none_or_opaque(leaf: object) -> bool:
    """Tells whether `leaf` is a unit of what a replica returns, None being a value too."""
    return leaf is None or is_opaque(leaf)


def is_none_opaque_or_slices(leaf: object) -> bool:
    """Tells whether `leaf` is a unit of what several replicas return, which is merged."""
    return is_none_or_opaque(leaf) or is_slices(leaf)


def is_wrapped_opaque_or_slices(leaf: object) -> bool:
    """Tells whether `leaf` is a unit of what goes into a merge function, or comes out of it."""
    return is_wrapped_or_opaque(leaf) or is_slices(leaf)


def is_none_wrapped_or_opaque(leaf: object) -> bool:
    """Tells whether `leaf` is a unit of what a function returns, None being a value too."""
    return leaf is None or is_wrapped(leaf) or is_opaque(leaf)


def is_number(leaf: object) -> bool:
    """Tells whether `leaf` is a number or an array of numbers, of JAX, NumPy or Python."""
    return isinstance(leaf, jax.Array) or is_host_value(leaf)
