"""What a compiled function returns: arrays of the program, wrapped again on the way out."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import PyTreeDef

from distribax import context, jax_private
from distribax.errors import HostMode, HostOnly
from distribax.execution.state.role_arguments import Exchange, RoleArgument
from distribax.execution.traces.frames import FunctionFrame
from distribax.values import (
    DistributedValues,
    Form,
    Global,
    Layout,
    Mirrored,
    Padded,
    is_none_wrapped_or_opaque,
    is_opaque,
    is_wrapped,
    nests,
)

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Held:
    """A part of a result that is no array of the program, but an object known from the trace."""

    value: object


def hold(value: object) -> Held:
    """Returns an object as a part of a result.

    Raises:
        TypeError: It has values in it that are known only while the function is traced.
    """
    attributes = getattr(value, "__dict__", {})
    traced = [name for name, each in attributes.items() if jax_private.is_tracer(each)]
    if traced and not is_opaque(value):
        kind = type(value).__name__
        raise TypeError(
            f"dx.function: a result is an object of the class {kind}, whose attribute "
            f"{traced[0]!r} is computed by the function. It would never get its value, as JAX does "
            f"not know what is in a {kind}. Return a dict, a tuple or a dataclass, or register the "
            "class with jax.tree_util.register_dataclass."
        )
    return Held(value)


Part: TypeAlias = Held | Form | None
"""A part of a result: an object, or an array of the program with its form; None as it is."""

_PLAIN_OBJECTS = (type(None), bool, int, float, complex, str, bytes, jax.Array, np.ndarray)


class Results:
    """The form of a function's results, learnt while it is traced."""

    def __init__(self) -> None:
        self._tree: PyTreeDef = jax.tree.structure(None)
        self._forms: list[Part] = []
        # Whether all parts are arrays of the program, of which none is in other processes.
        self._is_plain = False

    def take(self, result: object, frame: FunctionFrame) -> list[jax.Array]:
        """Splits `result` into the arrays that the program returns and their form."""
        leaves, self._tree = nests.flatten(result, is_none_wrapped_or_opaque)
        # A result must not share a buffer with a variable: the next step may overwrite that.
        owned = {id(value) for value in (*frame.values.values(), *frame.lifted.values())}
        self._forms, arrays = [], []
        form: Form | None
        for leaf in leaves:
            layout = _find_layout(leaf, frame) if is_wrapped(leaf) else None
            if isinstance(layout, (Global, Padded)) and jax_private.is_tracer(layout.array):
                form = Form.of(leaf, layout)
                array = constrain(layout.array, NamedSharding(layout.mesh, layout.spec))
            elif jax_private.is_tracer(leaf):
                form, array = None, leaf
                if frame.mesh is not None:
                    array = constrain(leaf, NamedSharding(frame.mesh, PartitionSpec()))
            else:
                self._forms.append(hold(leaf))
                continue
            self._forms.append(form)
            arrays.append(jnp.copy(array) if id(leaf) in owned or id(array) in owned else array)
        self._is_plain = jax.process_count() == 1 and all(each is None for each in self._forms)
        return arrays

    def rebuild(self, arrays: Iterable[jax.Array]) -> Any:
        """Puts the arrays of one call back into the form of the result."""
        if self._is_plain:
            return self._tree.unflatten(arrays)
        remaining = iter(arrays)
        leaves: list[object] = []
        for form in self._forms:
            if isinstance(form, Held):
                leaves.append(form.value)
            elif isinstance(form, Form):
                leaves.append(form.wrap(next(remaining)))
            else:
                array = next(remaining)
                leaves.append(array if array.is_fully_addressable else jax_private.localize(array))
        return self._tree.unflatten(leaves)

    @property
    def is_exchangeable(self) -> bool:
        """Whether no object that is returned may refer to a variable in a way of its own."""
        return all(
            isinstance(form.value, (RoleArgument, *_PLAIN_OBJECTS))
            for form in self._forms
            if isinstance(form, Held)
        )

    def exchange(self, exchange: Exchange) -> Results:
        """Returns the same form, with other variables where it has some."""
        made = copy.copy(self)
        made._forms = [
            Held(exchange(form.value)) if isinstance(form, Held) else form for form in self._forms
        ]
        return made


def _find_layout(value: DistributedValues, frame: FunctionFrame) -> Layout:
    """Returns how a wrapped result is stored; traced pieces that the code wrapped are joined."""
    layout = value.layout
    if isinstance(layout, (Global, Padded)):
        return layout
    if not any(map(jax_private.is_tracer, layout.pieces)):
        return layout
    mesh = frame.mesh or context.get_strategy().extended.mesh
    if mesh is not None and isinstance(value, Mirrored):
        return Global(value.get(), mesh, mirrored=True)
    joined = value.on_mesh(mesh) or value.pad(mesh) if mesh is not None else None
    if joined is None:
        raise HostOnly("the pieces of a result cannot be one array", HostMode.EAGER)
    return joined


def constrain(value: _Value, sharding: Sharding | None) -> _Value:
    """Fixes where a result of the program lives, so that the next call finds it there."""
    if not isinstance(sharding, NamedSharding):
        return value
    # A nest, as the state of other libraries may be; constants stay where they are.
    return jax.tree.map(
        lambda leaf: (
            lax.with_sharding_constraint(leaf, sharding) if jax_private.is_tracer(leaf) else leaf
        ),
        value,
    )
