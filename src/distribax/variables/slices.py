"""Parts of a variable that can be assigned: `v[0].assign(x)`.

Such a part is an array with methods that write it back. JAX's tracers cannot be given methods, so
that a `VariableSlice` stands for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from distribax import jax_private
from distribax.types import WriteKind
from distribax.values import ArrayLike, IndexedSlices
from distribax.values.arithmetic import unwrap_index
from distribax.variables import context_rules
from distribax.variables.context_rules import Assigned
from distribax.variables.placement import PlacedVariable


class SlicedVariable(PlacedVariable, Protocol):
    """A variable of which rows can be written."""

    def scatter_update(self, sparse_delta: IndexedSlices) -> Any:
        """Replaces some rows."""

    def scatter_add(self, sparse_delta: IndexedSlices) -> Any:
        """Adds to some rows."""


_V = TypeVar("_V", bound=SlicedVariable)


@jax.tree_util.register_pytree_node_class
class VariableSlice(ArrayLike, Generic[_V]):
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

    def as_array(self) -> jax.Array | VariableSlice[_V]:
        """Returns an array with methods that write to the variable, if there is one already."""
        if jax_private.is_tracer(self._array):
            return self
        methods = (self.assign, self.assign_add, self.assign_sub)
        return jax_private.add_methods(self._array, methods)

    @override
    def __jax_array__(self) -> jax.Array:
        return self._array

    def assign(
        self,
        value: Assigned,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> _V:
        """Replaces this part of the variable. In a replica, values are combined as by `v.assign`.

        Args:
            value: The new value: of the shape of the part, or a scalar.
            use_locking: Accepted as in TensorFlow; it changes nothing.
            name: Accepted as in TensorFlow; it changes nothing.
            read_value: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable.
        """
        return self._write(value, WriteKind.ASSIGN)

    def assign_add(self, delta: Assigned) -> _V:
        """Adds to this part of the variable.

        Args:
            delta: What to add: of the shape of the part, or a scalar.

        Returns:
            The variable.
        """
        return self._write(delta, WriteKind.ASSIGN_ADD)

    def assign_sub(self, delta: Assigned) -> _V:
        """Subtracts from this part of the variable.

        Args:
            delta: What to subtract: of the shape of the part, or a scalar.

        Returns:
            The variable.
        """
        return self._write(delta, WriteKind.ASSIGN_SUB)

    def _write(self, value: Assigned, kind: WriteKind) -> _V:
        variable = self._variable
        if variable.source is None:
            context_rules.write(variable, value, kind, self._index)
            return variable
        # Only the rows that change are sent, as others may write the rest.
        numbers = jnp.arange(variable.shape[0])
        first = self._index[0] if isinstance(self._index, tuple) else self._index
        rows = numbers if first is Ellipsis else jnp.atleast_1d(numbers[first])
        base = variable.read_value()
        part = (base if kind is WriteKind.ASSIGN else jnp.zeros_like(base)).at[self._index]
        array = context_rules.fit(variable, context_rules.unwrap(value), kind, self._index)
        changed = part.set(-array if kind is WriteKind.ASSIGN_SUB else array)
        write = variable.scatter_update if kind is WriteKind.ASSIGN else variable.scatter_add
        write(IndexedSlices(changed[rows], rows))
        return variable

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
