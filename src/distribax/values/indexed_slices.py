"""`dx.IndexedSlices`: some rows of an array that is zero elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

    def __init__(self, values: Any, indices: Any, dense_shape: Sequence[int] | None = None) -> None:
        self._values = values
        self._indices = indices
        self._dense_shape = None if dense_shape is None else tuple(map(int, dense_shape))

    @property
    def values(self) -> Any:
        """The rows."""
        return self._values

    @property
    def indices(self) -> Any:
        """Which rows of the table they are."""
        return self._indices

    @property
    def dense_shape(self) -> tuple[int, ...] | None:
        """The table's shape, or None if nobody has said it."""
        return self._dense_shape

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The table's shape, or None if nobody has said it."""
        return self._dense_shape

    @property
    def dtype(self) -> Any:
        """The data type of the rows."""
        return self._values.dtype

    def __jax_array__(self) -> jax.Array:
        if self._dense_shape is None:
            raise ValueError(
                "IndexedSlices: dense_shape is missing, so it is not known how many rows there "
                "are. Give the table's shape: dx.IndexedSlices(values, indices, table.shape)."
            )
        return self.added_to(jnp.zeros(self._dense_shape, self.dtype))

    def added_to(self, array: jax.Array) -> jax.Array:
        """Returns `array` with the rows added to it; indices that it does not have are left out."""
        rows = array.at[self._indices]
        return rows.add(self._values, mode="drop", wrap_negative_indices=False)

    def __mul__(self, factor: Any) -> Any:
        return self._scaled(factor, 1) if np.shape(factor) == () else super().__mul__(factor)

    def __rmul__(self, factor: Any) -> Any:
        return self * factor

    def __truediv__(self, divisor: Any) -> Any:
        return self._scaled(1, divisor) if np.shape(divisor) == () else super().__truediv__(divisor)

    def __neg__(self) -> IndexedSlices:
        return self._scaled(-1, 1)

    def _scaled(self, factor: Any, divisor: Any) -> IndexedSlices:
        return IndexedSlices(self._values * factor / divisor, self._indices, self._dense_shape)

    def __repr__(self) -> str:
        rows = np.shape(self._indices)
        return f"<dx.IndexedSlices of {rows[0] if rows else rows} rows of {self._dense_shape}>"

    # As a pytree: the arrays may be values that are traced.

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...] | None]:
        """Returns the arrays, and the rest."""
        return (self._values, self._indices), self._dense_shape

    @classmethod
    def tree_unflatten(cls, rest: tuple[int, ...] | None, arrays: Sequence[Any]) -> IndexedSlices:
        """Puts together what `tree_flatten` has taken apart."""
        return cls(arrays[0], arrays[1], rest)
