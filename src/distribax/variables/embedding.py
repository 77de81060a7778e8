"""`dx.embedding_lookup`: rows of a table, of which only those are fetched."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribax.variables.lookup import RowAccess, looked_up, plain, taken
from distribax.variables.sharded import ShardedVariable
from distribax.variables.variable import Variable


def embedding_lookup(
    params: Any, ids: Any, max_norm: float | None = None, name: str | None = None
) -> jax.Array:
    """Returns the rows of a table that `ids` names.

    Of a table that lives on parameter servers only these rows are fetched, also in a step that
    `dx.function` compiles, and its gradient (`dx.value_and_grad`) is a `dx.IndexedSlices` of them.
    An id that the table does not have is a ValueError; in a compiled step of other strategies,
    which cannot raise, its row is NaN.

    Args:
        params: The table: a `dx.Variable`, a `dx.ShardedVariable` or an array. A list of variables
            is one table, with their rows one after the other.
        ids: Integers of any shape.
        max_norm: If given, rows with a larger norm are scaled down to it.
        name: Not used; TensorFlow has it.

    Returns:
        An array of shape `ids.shape + table.shape[1:]`.

    Example:
        >>> import distribax as dx
        >>> table = dx.Variable([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
        >>> dx.embedding_lookup(table, [2, 0]).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    ids = plain(ids)
    if isinstance(params, (list, tuple)) and params and isinstance(params[0], Variable):
        params = ShardedVariable.of(params)
    if isinstance(params, RowAccess):
        rows = looked_up(params, ids, "embedding_lookup")
    else:
        table = jnp.asarray(plain(params))
        rows = taken(table, ids, "embedding_lookup", f"the table of shape {table.shape}")
    return rows if max_norm is None else _limited(rows, ids.ndim, max_norm)


def _limited(rows: Any, ids_ndim: int, max_norm: float) -> Any:
    """Scales rows down whose norm is too large."""
    dims = tuple(range(ids_ndim, rows.ndim))
    squares = jnp.sum(rows * rows, axis=dims, keepdims=True)
    is_large = squares > max_norm * max_norm
    # Where it is not used, the root must not be that of zero, whose gradient is not a number.
    norms = jnp.sqrt(jnp.where(is_large, squares, 1))
    return jnp.where(is_large, rows * (max_norm / norms), rows).astype(rows.dtype)
