"""What a compiled function is specialised for: the structure and types of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from distribax import jax_private
from distribax.execution.iterators import LiftedIterator
from distribax.values import DistributedValues, Global, Mirrored, PerReplica, Pieces, is_opaque


class Uneven(Exception):
    """The pieces of a distributed value cannot be one array, so the call must be eager."""


@dataclass(frozen=True, eq=False)
class Slot:
    """How one leaf of the arguments enters the program."""

    kind: str  # "array", "wrapped", "iterator" or "static"
    value: Any = None

    @property
    def is_dynamic(self) -> bool:
        """Whether the leaf is an input of the program."""
        return self.kind in ("array", "wrapped")

    def rebuild(self, traced: Any) -> Any:
        """Returns what the traced function sees for this leaf."""
        if self.kind == "wrapped":
            wrapper, mesh, stacked, mirrored = self.value
            return wrapper.of(Global(traced, mesh, stacked=stacked, mirrored=mirrored))
        return traced if self.kind == "array" else self.value


_NUMBERS = (int, float, complex)
_ARRAY = Slot("array")
_HOST_OR_ARRAY = (jax.Array, np.ndarray, np.generic, *_NUMBERS)


def read(leaves: list[Any], static: frozenset[int]) -> tuple[list[Any], list[Slot], list[Any]]:
    """Returns the key parts, the slots and the dynamic values of the argument leaves."""
    keys: list[Any] = []
    slots: list[Slot] = []
    dynamic: list[Any] = []
    for index, leaf in enumerate(leaves):
        if index in static:
            pass
        elif isinstance(leaf, jax.Array):
            # Arrays of random keys have no weak types.
            keys.append((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)))
            slots.append(_ARRAY)
            dynamic.append(_loose(leaf))
            continue
        elif isinstance(leaf, DistributedValues) and _holds_arrays(leaf):
            layout = leaf.layout if isinstance(leaf.layout, Global) else leaf.joined()
            if layout is None:
                raise Uneven
            array, wrapper = layout.array, Mirrored if layout.mirrored else PerReplica
            form = (wrapper, layout.mesh, layout.stacked, layout.mirrored)
            keys.append((form, array.shape, array.dtype))
            slots.append(Slot("wrapped", form))
            dynamic.append(array)
            continue
        elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype != object:
            keys.append((leaf.shape, leaf.dtype, False))
            slots.append(_ARRAY)
            dynamic.append(leaf)
            continue
        elif isinstance(leaf, _NUMBERS) and not isinstance(leaf, bool):
            keys.append(type(leaf))
            slots.append(_ARRAY)
            dynamic.append(leaf)
            continue
        elif isinstance(leaf, LiftedIterator):
            keys.append(LiftedIterator)
            slots.append(Slot("iterator", leaf))
            continue
        keys.append(_static_key(leaf))
        slots.append(Slot("static", leaf))
    return keys, slots, dynamic


def _holds_arrays(value: DistributedValues) -> bool:
    layout = value.layout
    if isinstance(layout, Global):
        return True
    if isinstance(layout, Pieces) and layout.mesh is not None and layout.mesh.is_multi_process:
        # Numbers of this process alone: as constants they would make it another program.
        return all(isinstance(piece, _HOST_OR_ARRAY) for piece in layout.pieces)
    return all(isinstance(piece, jax.Array) for piece in value.values)


def _loose(array: jax.Array) -> jax.Array:
    """Lets an array of one device meet variables that are spread over several."""
    if not jax_private.is_tracer(array) and array.committed and len(array.sharding.device_set) == 1:
        return jax_private.uncommit(array)
    return array


@dataclass(frozen=True)
class _ById:
    """A key for an object without a hash; it keeps the object alive, and so its id its own."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _static_key(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return _ById(leaf)
    return _ById(leaf) if is_opaque(leaf) else (type(leaf), leaf)


def closure_key(fn: Any) -> Any:
    """Returns a key that is equal for functions made by the same code over the same objects.

    A function defined inside another is a new object at each call; what it does is told by its
    code and by what it closes over.
    """
    owner = getattr(fn, "__self__", None)
    inner = getattr(fn, "__func__", fn)
    code = getattr(inner, "__code__", None)
    if code is None:
        return _ById(fn)
    cells = tuple(_cell_key(cell) for cell in inner.__closure__ or ())
    defaults = tuple(_value_key(value) for value in inner.__defaults__ or ())
    keywords = tuple((k, _value_key(v)) for k, v in (inner.__kwdefaults__ or {}).items())
    return (code, _ById(owner), cells, defaults, keywords)


def _cell_key(cell: Any) -> Any:
    try:
        return _value_key(cell.cell_contents)
    except ValueError:  # The name is not bound yet.
        return None


def _value_key(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return (type(value), value)
    if getattr(value, "__closure__", None) is not None and hasattr(value, "__code__"):
        return closure_key(value)
    return _ById(value)
