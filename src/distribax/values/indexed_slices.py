"""`dx.IndexedSlices`: some rows of an array that is zero elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax.values.arithmetic import ArrayLike


@jax.tree_util.register_pytree_node_class
class IndexedSlices(ArrayLike):
    """The gradient of a table of which a few rows were looked up: those rows, and which they are.

    Row `i` of `values` belongs to row `indices[i]` of the table; rows of an index that occurs
    twice are summed. Multiplied or divided by a number it stays sparse; where an array is needed
    it becomes one, `jnp.asarray(g)`, with all rows of the table.

    Args:
        values: The rows, stacked along the first dimension.
        indices: One integer for each row.
        dense_shape: The table's shape.

    Example:
        >>> import distribax as dx, jax.numpy as jnp
        >>> g = dx.IndexedSlices(jnp.array([[1.0], [2.0]]), jnp.array([2, 0]), (3, 1))
        >>> jnp.asarray(2 * g).tolist()
        [[4.0], [0.0], [2.0]]
    """

    def __init__(
        self,
        values: jax.Array | np.ndarray,
        indices: jax.Array | np.ndarray,
        dense_shape: Sequence[int] | None = None,
    ) -> None:
        self._values = values
        self._indices = indices
        self._dense_shape = None if dense_shape is None else tuple(map(int, dense_shape))

    @property
    def values(self) -> jax.Array | np.ndarray:
        """The rows."""
        return self._values

    @property
    def indices(self) -> jax.Array | np.ndarray:
        """Which rows of the table they are."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The table's shape, or None if it was not given."""
        return self._dense_shape

    @property
    @override
    def shape(self) -> tuple[int, ...] | None:  # type: ignore[override]
        """The table's shape, or None if it was not given."""
        return self._dense_shape

    @property
    @override
    def dtype(self) -> Any:
        """The data type of the rows."""
        return self._values.dtype

    @override
    def __jax_array__(self) -> jax.Array:
        if self._dense_shape is None:
            raise ValueError(
                "IndexedSlices: dense_shape is missing, so it is not known how many rows there "
                "are. Give the table's shape: dx.IndexedSlices(values, indices, table.shape)."
            )
        return self.add_to(jnp.zeros(self._dense_shape, self.dtype))

    def add_to(self, array: jax.Array) -> jax.Array:
        """Returns `array` with the rows added to it; indices that it does not have are left out.

        Args:
            array: An array of the table's shape.

        Returns:
            The sum.
        """
        rows = array.at[_as_array(self._indices)]
        return rows.add(_as_array(self._values), mode="drop", wrap_negative_indices=False)

    @override
    def __mul__(self, factor: jax.typing.ArrayLike) -> Any:
        return self._scale(factor, 1) if np.shape(factor) == () else super().__mul__(factor)

    @override
    def __rmul__(self, factor: jax.typing.ArrayLike) -> Any:
        return self * factor

    @override
    def __truediv__(self, divisor: jax.typing.ArrayLike) -> Any:
        return self._scale(1, divisor) if np.shape(divisor) == () else super().__truediv__(divisor)

    @override
    def __neg__(self) -> IndexedSlices:
        return self._scale(-1, 1)

    def _scale(self, factor: jax.typing.ArrayLike, divisor: jax.typing.ArrayLike) -> IndexedSlices:
        return IndexedSlices(self._values * factor / divisor, self._indices, self._dense_shape)

    @override
    def __repr__(self) -> str:
        rows = np.shape(self._indices)
        return f"<dx.IndexedSlices of {rows[0] if rows else rows} rows of {self._dense_shape}>"

    # As a pytree: the arrays may be traced.

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...] | None]:
        """Returns the arrays, and the rest."""
        return (self._values, self._indices), self._dense_shape

    @classmethod
    def tree_unflatten(cls, rest: tuple[int, ...] | None, arrays: Sequence[Any]) -> IndexedSlices:
        """Returns the object that `tree_flatten` was called on.

        Args:
            rest: The table's shape.
            arrays: The rows and their indices.

        Returns:
            The rows with their indices.
        """
        return cls(arrays[0], arrays[1], rest)


def _as_array(part: Any) -> Any:
    """Returns rows or numbers that all replicas share as an array."""
    # Values that differ by replica raise an error themselves: they are not one array.
    return part if isinstance(part, (jax.Array, np.ndarray)) else part.__jax_array__()
