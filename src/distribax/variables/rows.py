"""Rows of a variable: reading and writing some of them, wherever the variable lives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribax import jax_private
from distribax.execution import frames, lookup_gradients, overlay, remote_writes, row_lookups
from distribax.jax_private import jaxprs
from distribax.types import WriteKind
from distribax.values import ArrayLike, IndexedSlices, Mirrored
from distribax.variables import context_rules
from distribax.variables.sharded.division import Division, check_ids, check_kind


class RowAccess(ArrayLike):
    """TensorFlow's `sparse_read` and `scatter_*`, for variables."""

    shape: Any
    dtype: Any
    source: Any
    described: Any

    @property
    def row_shards(self) -> list[tuple[int, Any]]:
        """The variables that have the rows, each with the number of its first row."""
        return [(0, self)]

    @property
    def division(self) -> Division:
        """Which rows each of them has."""
        return Division((0, self.shape[0]))

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """Returns the rows that `indices` names; only they are fetched from a server."""
        return looked_up(self, indices, "sparse_read")

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Adds to some rows; an index that occurs twice is added twice."""
        indices, rows = _parts(sparse_delta, "scatter_add")
        return self._write_rows("scatter_add", WriteKind.ASSIGN_ADD, indices, rows)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Subtracts from some rows; an index that occurs twice is subtracted twice."""
        indices, rows = _parts(sparse_delta, "scatter_sub")
        return self._write_rows("scatter_sub", WriteKind.ASSIGN_ADD, indices, -rows)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Replaces some rows."""
        indices, rows = _parts(sparse_delta, "scatter_update")
        return self._write_rows("scatter_update", WriteKind.ASSIGN, indices, rows)

    def _write_rows(self, what: str, kind: WriteKind, indices: Any, rows: Any) -> Any:
        _check_rows(self, what, indices, rows)
        if self.source is None:
            _write_here(self, kind, indices, rows)
        else:
            _send(self, what, kind, indices, rows)
        return self


# Reading.


def looked_up(table: Any, ids: Any, what: str) -> Any:
    """Returns rows of a table; only they are fetched if the table lives in another process."""
    ids = plain(ids)
    if table.source is None or not _is_untouched(table):
        return taken(table.read_value(), ids, what, table.described)
    context_rules.refuse_in_jit(table)
    check_kind(what, table.shape, table.described, ids.dtype)
    frame = frames.current()
    if frame is not None:
        rows, ids = row_lookups.look_up(frame, table, ids)
    else:
        ids = jaxprs.find_in_trace(ids, None)
        if ids is None:
            raise RuntimeError(
                f"{what}: the ids for {table.described} are values of a JAX transformation that "
                "is still tracing (jax.jit, jax.vmap, jax.lax.scan, ...). Use @dx.function "
                "instead of @jax.jit; for other transformations look up the rows outside, and "
                "pass them in."
            )
        ids = np.asarray(ids)
        rows = table.source.rows([(table, ids)])[0]
    return lookup_gradients.tap_rows(table, rows, ids)


def taken(value: Any, ids: Any, what: str, described: str) -> Any:
    """Returns rows of an array that is here."""
    if jax_private.is_tracer(ids):
        check_kind(what, value.shape, described, ids.dtype)
    else:
        check_ids(what, value.shape, described, np.asarray(ids))
    return value.at[ids].get(mode="fill", wrap_negative_indices=False)


def plain(array: Any) -> Any:
    """Returns what JAX, or else NumPy, computes with; NumPy's large integers stay what they are."""
    if isinstance(array, Mirrored):
        array = array.get()
    if isinstance(array, ArrayLike):
        array = array.__jax_array__()
    if isinstance(array, jax.Array):
        return array
    # A list may be one of values that are traced.
    is_traced = any(map(jax_private.is_tracer, jax.tree.leaves(array)))
    return jnp.asarray(array) if is_traced else np.asarray(array)


def _is_untouched(table: Any) -> bool:
    """Tells whether the rows of the table are those that it has where it lives."""
    variables = [variable for _, variable in table.row_shards]
    frame = frames.current()
    if frame is not None and any(map(frame.function.deferred.has_written, variables)):
        return False
    return all(map(overlay.is_unread, variables)) and lookup_gradients.can_tap_rows(
        table, variables
    )


# Writing.


def _parts(sparse: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(sparse, IndexedSlices):
        raise TypeError(
            f"{what}: sparse_delta={sparse!r} is not a dx.IndexedSlices. Pass the rows and their "
            "indices: dx.IndexedSlices(values, indices)."
        )
    return plain(sparse.indices), plain(sparse.values)


def _check_rows(table: Any, what: str, indices: Any, rows: Any) -> None:
    if jax_private.is_tracer(indices):
        check_kind(what, table.shape, table.described, indices.dtype)
    else:
        check_ids(what, table.shape, table.described, np.asarray(indices))
    if indices.ndim != 1 or rows.shape != (*indices.shape, *table.shape[1:]):
        raise ValueError(
            f"{what}: values of shape {tuple(rows.shape)} with indices of shape "
            f"{tuple(indices.shape)} do not fit {table.described}. Expected indices of one "
            f"dimension, and values of shape {('n', *table.shape[1:])}."
        )
    if not np.can_cast(rows.dtype, table.dtype, "same_kind"):
        raise ValueError(
            f"{what}: values of data type {rows.dtype.name} do not fit {table.described} of data "
            f"type {np.dtype(table.dtype).name}. Convert them first."
        )


def _write_here(table: Any, kind: WriteKind, indices: Any, rows: Any) -> None:
    for start, variable in table.row_shards:
        if kind is WriteKind.ASSIGN:
            changed = remote_writes.scatter_rows(variable.read_value(), kind, indices, rows, start)
            variable.assign(changed)
        else:
            zeros = jnp.zeros(variable.shape, variable.dtype)
            variable.assign_add(remote_writes.scatter_rows(zeros, kind, indices, rows, start))


def _send(table: Any, what: str, kind: WriteKind, indices: Any, rows: Any) -> None:
    """Writes rows of a table that lives in another process: there, at once or after the step."""
    indices, rows = frames.detach(indices), frames.detach(rows).astype(table.dtype)
    # What stands in for the table, in a function that is being differentiated, changes as well.
    standing = [
        (values, start, variable, variable.read_value())
        for start, variable in table.row_shards
        if (values := overlay.find_overlay(variable)) is not None
    ]
    frame = frames.current()
    if frame is not None:
        frame.function.defer_rows(table, kind, jnp.asarray(indices), jnp.asarray(rows))
    elif jax_private.is_tracer(indices) or jax_private.is_tracer(rows):
        raise RuntimeError(
            f"{what}: {table.described} was given values of a JAX transformation that is still "
            "tracing. Use @dx.function instead of @jax.jit; for other transformations return the "
            "rows, and write them outside."
        )
    else:
        table.source.write_rows(table, kind, np.asarray(indices), np.asarray(rows))
    for values, start, variable, old in standing:
        changed = remote_writes.scatter_rows(old, kind, indices, rows, start)
        values[variable] = frames.detach(changed)
