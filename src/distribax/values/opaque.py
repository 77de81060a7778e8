"""Objects that are passed on as they are, although JAX would take them apart.

A module of another library may be a pytree. Taken apart and put together again it would be a copy,
and what a replica writes to a copy is lost; so nests are taken apart down to such objects only.
"""

from __future__ import annotations

from typing import Any

_known: tuple[type, ...] = ()


def make_opaque(*types: type) -> None:
    """Passes objects of these types, and of types derived from them, on as they are."""
    global _known
    _known = tuple(dict.fromkeys((*_known, *types)))


def is_opaque(leaf: Any) -> bool:
    """Tells whether `leaf` is passed on as it is."""
    return isinstance(leaf, _known)
