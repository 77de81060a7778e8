"""Parts of a variable that can be assigned: `v[0].assign(x)`.

Such a part is an array with methods that write it back. JAX's tracers cannot be given methods, so
that a `VariableSlice` stands for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax import jax_private
from distribax.types import WriteKind
from distribax.values import ArrayLike, IndexedSlices
from distribax.values.arithmetic import unwrap_index
from distribax.variables import context_rules, row_writes
from distribax.variables.assignment import Assignable
from distribax.variables.context_rules import Assigned
from distribax.variables.placement import PlacedVariable

_V = TypeVar("_V", bound=PlacedVariable)


@jax.tree_util.register_pytree_node_class
class VariableSlice(ArrayLike, Assignable[_V]):
    """What `v[index]` is while a function is traced: a tracer of that part, which can be assigned.

    In nests it is the tracer alone.

    Args:
        variable: The variable.
        index: Which part of it, as for an array.
    """

    def __init__(self, variable: _V, index: object) -> None:
        self._variable = variable
        self._index = unwrap_index(index)
        self._array = variable.read_value()[self._index]

    @property
    def _is_known(self) -> bool:
        """Whether the index has no traced numbers."""
        return not any(map(jax_private.is_tracer, jax.tree.leaves(self._index)))

    def as_array(self) -> jax.Array | VariableSlice[_V]:
        """Returns an array with methods that write to the variable, if there is one already."""
        if jax_private.is_tracer(self._array):
            return self
        methods = (self.assign, self.assign_add, self.assign_sub)
        return jax_private.add_methods(self._array, methods)

    @override
    def __jax_array__(self) -> jax.Array:
        return self._array

    @override
    def _write(self, kind: WriteKind, value: Assigned) -> _V:
        variable = self._variable
        if self._is_known:
            _check_inside(variable, kind, self._index)
        if variable.source is None:
            context_rules.write(variable, value, kind, self._index)
            return variable
        array = context_rules.fit(variable, context_rules.unwrap(value), kind, self._index)
        if kind is WriteKind.ASSIGN:
            changed = variable.read_value().at[self._index].set(array)
        else:
            signed = -array if kind is WriteKind.ASSIGN_SUB else array
            changed = jnp.zeros(variable.shape, variable.dtype).at[self._index].add(signed)
        if not variable.shape:
            context_rules.write(
                variable, changed, kind if kind is WriteKind.ASSIGN else WriteKind.ASSIGN_ADD
            )
            return variable
        # Only the rows that change are sent, as others may write the rest.
        rows, is_first = self._find_rows()
        if not rows.size:
            return variable
        if kind is WriteKind.ASSIGN:
            row_writes.write_rows(variable, str(kind), kind, IndexedSlices(changed[rows], rows))
        else:
            once = is_first.reshape(-1, *(1,) * (len(variable.shape) - 1))
            parts = jnp.where(once, changed[rows], jnp.zeros((), variable.dtype))
            row_writes.write_rows(
                variable, str(kind), WriteKind.ASSIGN_ADD, IndexedSlices(parts, rows)
            )
        return variable

    def _find_rows(self) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of the rows that change, and for each whether it is the first such.

        Numbers that are not known yet may occur several times.
        """
        shape, index = self._variable.shape, self._index
        if self._is_known:
            grid = np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
            rows = jnp.asarray(np.unique(np.broadcast_to(grid, shape)[_to_host(index)]))
            return rows, jnp.ones(rows.shape, bool)
        first = index[0] if isinstance(index, tuple) else index
        numbers = jnp.arange(shape[0])
        rows = numbers if first is Ellipsis or first is None else jnp.ravel(numbers[first])
        places = jnp.arange(rows.size)
        earliest = jnp.full(shape[0], rows.size).at[rows].min(places)
        return rows, earliest[rows] == places

    @override
    def __repr__(self) -> str:
        return repr(self._array)

    # As a pytree: the array.

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """Returns the array, and no more."""
        return (self._array,), None

    @classmethod
    def tree_unflatten(cls, rest: None, arrays: Iterable[Any]) -> Any:
        """Returns the array: a part of a variable that has changed is not the variable's."""
        (array,) = arrays
        return array


def _check_inside(variable: PlacedVariable, kind: WriteKind, index: object) -> None:
    """Raises if a part is outside of the variable, where JAX would write nothing."""
    try:
        np.broadcast_to(np.zeros((), bool), variable.shape)[_to_host(index)]
    except IndexError as error:
        raise IndexError(
            f"{kind}: [{index!r}] is not a part of {variable.described}: {error}. Expected an "
            "index inside its shape."
        ) from error


def _to_host(index: Any) -> Any:
    """Returns an index as NumPy takes it."""
    if isinstance(index, tuple):
        return tuple(map(_to_host, index))
    return np.asarray(index) if isinstance(index, jax.Array) else index
