"""What a compiled function is specialised for: the structure and types of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import CellType, FunctionType
from typing import Any, TypeAlias

import jax
import numpy as np

from distribax import jax_private
from distribax.execution.state.role_arguments import RoleArgument
from distribax.execution.traces.iterators import LiftedIterator
from distribax.types import Identity
from distribax.values import (
    ArrayLike,
    DistributedValues,
    Form,
    Global,
    Padded,
    Pieces,
    is_opaque,
    is_wrapped,
)


class Uneven(Exception):
    """The pieces of a value differ in more than their sizes, so the call must be eager."""


class Traced(Exception):
    """A JAX transformation is tracing an argument: the call is part of its program."""


class StaticSlot:
    """An object that is no input of the program: part of the signature, and passed on as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


class RoleSlot(StaticSlot):
    """A variable: programs can be called with another one of the same form."""


Slot: TypeAlias = StaticSlot | Form | None
"""How a leaf of the arguments enters the program. None is an array or a number that is an input;
a distributed value has a form, and its array is the input."""

_NUMBERS = (int, float, complex)
_HOST_OR_ARRAY = (jax.Array, np.ndarray, np.generic, *_NUMBERS)


def read(
    leaves: Sequence[object], static: frozenset[int]
) -> tuple[list[Hashable], list[Slot], list[Any]]:
    """Returns the key parts, the slots and the dynamic values of the argument leaves.

    Raises:
        Uneven: The pieces of a distributed value differ in more than their sizes.
        Traced: A JAX transformation is tracing one of the leaves.
        RuntimeError: A leaf was donated to an earlier call.
    """
    keys: list[Hashable] = []
    slots: list[Slot] = []
    dynamic: list[Any] = []
    for index, leaf in enumerate(leaves):
        key: Hashable
        slot: Slot
        # What nearly all calls are given comes first: every call of a compiled step gets here.
        if index in static:
            key, slot = _make_static_key(leaf), StaticSlot(leaf)
        elif is_wrapped(leaf):
            key, slot, value = _read_wrapped(leaf)
            dynamic += value
        elif jax_private.is_concrete_array(leaf):
            jax_private.refuse_deleted(leaf)
            key, slot = (leaf.shape, leaf.dtype, leaf.weak_type), None
            dynamic.append(_uncommit(leaf))
        elif isinstance(leaf, jax.Array):
            if jax_private.is_tracer(leaf):
                raise Traced
            # Random keys, which have no weak types.
            key, slot = (leaf.shape, leaf.dtype, False), None
            dynamic.append(_uncommit(leaf))
        elif isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype != object:
            key, slot = (leaf.shape, leaf.dtype, False), None
            dynamic.append(leaf)
        elif isinstance(leaf, _NUMBERS) and not isinstance(leaf, bool):
            key, slot = (type(leaf),), None
            dynamic.append(leaf)
        elif isinstance(leaf, LiftedIterator):
            key, slot = (LiftedIterator,), StaticSlot(leaf)
        elif isinstance(leaf, RoleArgument):
            key, slot = Identity(leaf), RoleSlot(leaf)
        else:
            key, slot = _make_static_key(leaf), StaticSlot(leaf)
        keys.append(key)
        slots.append(slot)
    return keys, slots, dynamic


def _read_wrapped(value: DistributedValues) -> tuple[Hashable, Slot, list[Any]]:
    layout = value.layout if isinstance(value.layout, (Global, Padded)) else _join(value)
    if layout is None:
        return _make_static_key(value), StaticSlot(value), []
    array = layout.array
    if jax_private.is_tracer(array):
        raise Traced
    jax_private.refuse_deleted(array)
    form = Form.of(value, layout)
    return (form, array.shape, array.dtype), form, [array]


def _join(value: DistributedValues) -> Global | Padded | None:
    """Returns pieces as one array over the mesh; None if they are no arrays."""
    if not _holds_arrays(value):
        return None
    layout = value.join() or value.pad()
    if layout is None:
        raise Uneven
    return layout


def _holds_arrays(value: DistributedValues) -> bool:
    layout = value.layout
    if isinstance(layout, Pieces) and layout.mesh is not None and layout.mesh.is_multi_process:
        # Numbers of this process alone: as constants they would make it another program.
        return all(isinstance(piece, _HOST_OR_ARRAY) for piece in layout.pieces)
    return all(isinstance(piece, jax.Array) for piece in value.values)


def _uncommit(array: jax.Array) -> jax.Array:
    """Lets an array of one device meet variables that are spread over several."""
    if array.committed and len(array.sharding.device_set) == 1:
        return jax_private.uncommit(array)
    return array


def _make_static_key(leaf: object) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return Identity(leaf)
    # Variables are compared by value.
    return Identity(leaf) if is_opaque(leaf) or isinstance(leaf, ArrayLike) else (type(leaf), leaf)


def make_closure_key(fn: Callable[..., object]) -> Hashable:
    """Returns a key that is equal for functions made by the same code over the same objects.

    A function defined inside another is a new object at each call; its code and what it closes over
    say what it does.
    """
    # Functions, bound methods and callables of other kinds are all welcome here.
    owner = getattr(fn, "__self__", None)
    inner = getattr(fn, "__func__", fn)
    code = getattr(inner, "__code__", None)
    if code is None:
        return Identity(fn)
    cells = tuple(_make_cell_key(cell) for cell in inner.__closure__ or ())
    defaults = tuple(_make_value_key(value) for value in inner.__defaults__ or ())
    keywords = tuple((k, _make_value_key(v)) for k, v in (inner.__kwdefaults__ or {}).items())
    return (code, Identity(owner), cells, defaults, keywords)


def _make_cell_key(cell: CellType) -> Hashable:
    try:
        return _make_value_key(cell.cell_contents)
    except ValueError:  # The name is not bound yet.
        return None


def _make_value_key(value: object) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return (type(value), value)
    if isinstance(value, FunctionType) and value.__closure__ is not None:
        return make_closure_key(value)
    return Identity(value)
