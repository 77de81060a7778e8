"""What a compiled function returns: arrays of the program, wrapped again on the way out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from distribax import context, jax_private
from distribax.errors import HostMode, HostOnly
from distribax.execution.frames import FunctionFrame
from distribax.values import DistributedValues, Global, Mirrored, is_none_wrapped_or_opaque


class Results:
    """The form of a function's results, learnt while it is traced."""

    def __init__(self) -> None:
        self._tree: Any = None
        self._forms: list[Any] = []
        # By place, the last sharding that was found to be of this process alone: JAX takes its time
        # to tell, and it is mostly the same.
        self._local: dict[int, Any] = {}

    def take(self, result: Any, frame: FunctionFrame) -> list[Any]:
        """Splits `result` into the arrays that the program returns and their form."""
        leaves, self._tree = jax.tree.flatten(result, is_leaf=is_none_wrapped_or_opaque)
        # A result must not share a buffer with a variable: the next step may overwrite that.
        owned = {id(value) for value in (*frame.values.values(), *frame.lifted.values())}
        self._forms, arrays = [], []
        for leaf in leaves:
            layout = _layout(leaf, frame) if isinstance(leaf, DistributedValues) else None
            form: Any
            if isinstance(layout, Global):
                form = (type(leaf), layout.mesh, layout.stacked, layout.mirrored)
                array = constrained(layout.array, NamedSharding(layout.mesh, layout.spec))
            elif jax_private.is_tracer(leaf):
                form, array = "array", leaf
                if frame.mesh is not None:
                    array = constrained(leaf, NamedSharding(frame.mesh, PartitionSpec()))
            else:
                self._forms.append((None, leaf))
                continue
            self._forms.append((form, None))
            arrays.append(jnp.copy(array) if id(leaf) in owned or id(array) in owned else array)
        return arrays

    def rebuild(self, arrays: list[Any]) -> Any:
        """Puts the arrays of one call back into the form of the result."""
        remaining = iter(arrays)
        leaves = []
        for place, (form, held) in enumerate(self._forms):
            if form is None:
                leaves.append(held)
            elif form == "array":
                leaves.append(self._for_user(place, next(remaining)))
            else:
                wrapper, mesh, stacked, mirrored = form
                layout = Global(next(remaining), mesh, stacked=stacked, mirrored=mirrored)
                leaves.append(wrapper.of(layout))
        return jax.tree.unflatten(self._tree, leaves)

    def _for_user(self, place: int, array: jax.Array) -> Any:
        sharding = array.sharding
        if sharding is self._local.get(place):
            return array
        if array.is_fully_addressable:
            self._local[place] = sharding
            return array
        return jax_private.localize(array)


def _layout(value: DistributedValues, frame: FunctionFrame) -> Any:
    """Returns how a wrapped result is stored; traced pieces that the code wrapped are joined."""
    layout = value.layout
    if isinstance(layout, Global) or not any(map(jax_private.is_tracer, layout.pieces)):
        return layout
    mesh = frame.mesh or context.get_strategy().extended.mesh
    if mesh is not None and isinstance(value, Mirrored):
        return Global(value.get(), mesh, mirrored=True)
    joined = value.on_mesh(mesh) if mesh is not None else None
    if joined is None:
        raise HostOnly("the pieces of a result differ in shape", HostMode.EAGER)
    return joined


def constrained(value: Any, sharding: Any) -> Any:
    """Fixes where a result of the program lives, so that the next call finds it there."""
    if not isinstance(sharding, NamedSharding):
        return value
    if jax_private.is_tracer(value):
        return lax.with_sharding_constraint(value, sharding)
    # A nest, as the state of other libraries may be, or a constant.
    return (
        value
        if isinstance(value, jax.Array)
        else jax.tree.map(
            lambda leaf: constrained(leaf, sharding) if jax_private.is_tracer(leaf) else leaf, value
        )
    )
