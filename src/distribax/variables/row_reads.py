"""Reading rows and elements of a table, here or in another process."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from distribax import contracts, jax_private
from distribax.execution import frames, lookup_gradients, overlay, row_lookups
from distribax.jax_private import jaxprs
from distribax.variables import context_rules, row_writes
from distribax.variables.row_writes import Array, to_array
from distribax.variables.sharded.division import check_ids, check_kind, check_places


def look_up(
    table: contracts.Table, asked: jax.typing.ArrayLike | Sequence[object], what: str
) -> jax.Array:
    """Returns rows of a table; only they are fetched if the table lives in another process."""
    ids: Array = to_array(asked)
    if table.source is None or not _is_untouched(table):
        return take_rows(table.read_value(), ids, what, table.described)
    context_rules.guard_read(table)
    check_kind(what, table.shape, table.described, ids.dtype)
    frame = frames.current()
    if frame is not None:
        rows, ids = row_lookups.look_up(frame, table, ids)
    else:
        known = jaxprs.find_in_trace(ids, None)
        if known is None:
            raise RuntimeError(
                f"{what}: the ids for {table.described} are values of a JAX transformation that "
                "is still tracing (jax.jit, jax.vmap, jax.lax.scan, ...). Use @dx.function "
                "instead of @jax.jit; for other transformations look up the rows outside, and "
                "pass them in."
            )
        ids = np.asarray(known)
        rows = table.source.pull_rows([(table, ids)])[0]
    return lookup_gradients.mark_rows(table, rows, ids)


def gather_elements(
    table: contracts.Table, places: jax.typing.ArrayLike | Sequence[object], what: str
) -> jax.Array:
    """Returns elements of a table, or smaller arrays; only their rows are fetched."""
    indices: Array = to_array(places)
    row_writes.check_depth(what, table, indices)
    depth = indices.shape[-1]
    ids, *others = (indices[..., column] for column in range(depth))
    if not others:
        return look_up(table, ids, what)
    if not jax_private.is_tracer(indices):
        lines = np.asarray(indices).reshape(-1, depth)
        check_places(what, table.shape, table.described, lines)
    if table.source is None:
        return _take(table.read_value(), (ids, *others))
    rows = look_up(table, ids, what)
    return _take(rows, (*np.ix_(*map(np.arange, ids.shape)), *others))


def _take(array: jax.Array, index: tuple[Array, ...]) -> jax.Array:
    return array.at[index].get(mode="fill", wrap_negative_indices=False)


def take_rows(value: jax.Array, ids: Array, what: str, described: str) -> jax.Array:
    """Returns rows of an array that is here."""
    if jax_private.is_tracer(ids):
        check_kind(what, value.shape, described, ids.dtype)
    else:
        check_ids(what, value.shape, described, np.asarray(ids))
    return value.at[ids].get(mode="fill", wrap_negative_indices=False)


def _is_untouched(table: contracts.Table) -> bool:
    """Tells whether the rows of the table are those that it has where it lives."""
    variables = [variable for _, variable in table.row_shards]
    frame = frames.current()
    if frame is not None and any(map(frame.function.deferred.has_written, variables)):
        return False
    return all(map(overlay.is_unread, variables)) and lookup_gradients.can_mark_rows(
        table, variables
    )
