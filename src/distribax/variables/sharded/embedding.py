"""`dx.embedding_lookup`: rows of a table, of which only those are fetched."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from distribax import jax_private
from distribax.values import ArrayLike
from distribax.variables.row_reads import look_up, take_rows
from distribax.variables.row_writes import to_array
from distribax.variables.rows import RowAccess
from distribax.variables.sharded.sharded_variable import ShardedVariable


def embedding_lookup(
    params: RowAccess | jax.typing.ArrayLike | Sequence[RowAccess | jax.typing.ArrayLike],
    ids: jax.typing.ArrayLike | Sequence[object],
    max_norm: float | None = None,
    name: str | None = None,
) -> jax.Array:
    """Returns the rows of a table that `ids` names.

    Of a table that lives on parameter servers only these rows are fetched, also in a step that
    `dx.function` compiles, and its gradient (`dx.value_and_grad`) is a `dx.IndexedSlices` of them.
    An id that the table does not have is a ValueError; in a compiled step of other strategies,
    which cannot raise, its row is NaN.

    Args:
        params: The table: a `dx.Variable`, a `dx.ShardedVariable` or an array. A list of variables
            or arrays is one table, with their rows one after the other.
        ids: Integers of any shape.
        max_norm: If given, rows with a larger norm are scaled down to it.
        name: Not used; TensorFlow has it.

    Returns:
        An array of shape `ids.shape + table.shape[1:]`.

    Raises:
        ValueError: An id is not a row of the table, or `max_norm` is not positive.
        TypeError: `params` is not a table.

    Example:
        >>> import distribax as dx
        >>> table = dx.Variable([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
        >>> dx.embedding_lookup(table, [2, 0]).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    _check_norm(max_norm)
    ids = _to_ids(ids)
    table = _join(params)
    if isinstance(table, RowAccess):
        rows = look_up(table, ids, "embedding_lookup")
    else:
        rows = take_rows(table, ids, "embedding_lookup", f"the table of shape {table.shape}")
    return rows if max_norm is None else _limit_norm(rows, ids.ndim, max_norm)


def _to_ids(ids: object) -> jax.Array | np.ndarray:
    try:
        found = to_array(ids)
    except ValueError as error:
        raise ValueError(
            f"embedding_lookup: ids={ids!r:.100} is no array: {error} Expected integers of one "
            "shape; fill up lists that are shorter than others."
        ) from error
    # NumPy takes an empty list for one of floats.
    is_empty_list = isinstance(ids, (list, tuple)) and not found.size
    return found.astype(np.int32) if is_empty_list else found


def _join(params: object) -> RowAccess | jax.Array:
    """Returns the table as one: a variable, or an array."""
    if isinstance(params, RowAccess):
        return params
    parts = params if isinstance(params, (list, tuple)) else ()
    if parts and all(isinstance(part, RowAccess) for part in parts):
        return ShardedVariable.of([each for part in parts for _, each in part.row_shards])
    try:
        if any(map(_has_rows, parts)):
            return jnp.concatenate([jnp.asarray(to_array(part)) for part in parts])
        return jnp.asarray(to_array(params))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"embedding_lookup: params={params!r:.100} is not a table: {error} Expected a "
            "dx.Variable, a dx.ShardedVariable, an array, or a list of them which have the same "
            "number of columns."
        ) from error


def _has_rows(part: object) -> bool:
    return isinstance(part, (np.ndarray, jax.Array, ArrayLike)) and bool(np.ndim(part))


def _check_norm(max_norm: float | None) -> None:
    if max_norm is None or jax_private.is_tracer(max_norm):
        return
    if np.ndim(max_norm) or np.asarray(max_norm).dtype.kind not in "iuf" or not max_norm > 0:
        raise ValueError(f"embedding_lookup: max_norm={max_norm!r}. Expected a number above 0.")


def _limit_norm(rows: jax.Array, ids_ndim: int, max_norm: float) -> jax.Array:
    """Scales rows down whose norm is too large."""
    dims = tuple(range(ids_ndim, rows.ndim))
    squares = jnp.sum(rows * rows, axis=dims, keepdims=True)
    is_large = squares > max_norm * max_norm
    # Where it is not used, the root must not be that of zero, whose gradient is not a number.
    norms = jnp.sqrt(jnp.where(is_large, squares, 1))
    return jnp.where(is_large, rows * (max_norm / norms), rows).astype(rows.dtype)
