"""Writing some rows, or elements, of a table: here, in all replicas together, or on servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax import context, contracts, jax_private
from distribax.execution import frames, overlay, remote_writes
from distribax.types import VariableAggregation, WriteKind
from distribax.values import ArrayLike, IndexedSlices, Mirrored, is_wrapped
from distribax.variables import context_rules
from distribax.variables.placement import PlacedVariable
from distribax.variables.sharded.division import check_kind, check_places

Array: TypeAlias = "jax.Array | np.ndarray"


class PlacedTable(contracts.Table, Protocol):
    """A table whose variables have placements."""

    @property
    @override
    def row_shards(self) -> Sequence[tuple[int, PlacedVariable]]:
        """The variables that have the rows, each with the index of its first row."""


def to_array(array: object) -> Any:
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


def split(sparse: object, what: str) -> tuple[Array, Array]:
    """Returns the indices and the rows of what was given to a `scatter_*` method."""
    if not isinstance(sparse, IndexedSlices):
        raise TypeError(
            f"{what}: sparse_delta={sparse!r} is not a dx.IndexedSlices. Pass the rows and their "
            "indices: dx.IndexedSlices(values, indices)."
        )
    return to_array(sparse.indices), to_array(sparse.values)


def write_rows(table: PlacedTable, what: str, kind: WriteKind, sparse: object) -> None:
    """Writes rows: those of `indices`, of any shape, to `values` of `indices.shape + row.shape`."""
    indices, rows = split(sparse, what)
    _check_here(table, what, indices.reshape(-1), indices.dtype)
    row = table.shape[1:]
    _check_values(table, what, indices, rows, (*indices.shape, *row))
    rows = jnp.broadcast_to(rows, (indices.size, *row)) if not rows.shape else rows
    _write(table, what, kind, indices.reshape(-1), rows.reshape(indices.size, *row))


def write_elements(
    table: PlacedTable, what: str, kind: WriteKind, places: object, updates: object
) -> None:
    """Writes elements, or smaller arrays: the last dimension of `places` says where each is."""
    indices, values = to_array(places), to_array(updates)
    check_depth(what, table, indices)
    depth = indices.shape[-1]
    lines = indices.reshape(-1, depth)
    _check_here(table, what, lines, indices.dtype)
    part = table.shape[depth:]
    _check_values(table, what, indices, values, (*indices.shape[:-1], *part))
    values = jnp.broadcast_to(values, (len(lines), *part)) if not values.shape else values
    flat = lines[:, 0] if depth == 1 else lines
    _write(table, what, kind, flat, values.reshape(len(lines), *part))


def write_batches(table: PlacedTable, what: str, sparse: object) -> None:
    """Replaces, in each of the arrays along the first dimensions, what its own indices name."""
    indices, values = split(sparse, what)
    batch = tuple(indices.shape[:-1])
    if not indices.ndim or batch != table.shape[: len(batch)]:
        raise ValueError(
            f"{what}: indices of shape {tuple(indices.shape)} do not fit {table.described}. All "
            "dimensions but their last one are the first ones of the variable."
        )
    if not batch:
        write_rows(table, what, WriteKind.ASSIGN, sparse)
        return
    ahead = np.indices(indices.shape)[:-1]
    pack = jnp.stack if jax_private.is_tracer(indices) else np.stack
    places = pack([*ahead, indices], axis=-1)
    write_elements(table, what, WriteKind.ASSIGN, places, values)


def check_depth(what: str, table: contracts.Table, indices: Array) -> None:
    """Raises if the last dimension of indices is not that of places in the table."""
    check_kind(what, table.shape, table.described, indices.dtype)
    if not indices.ndim or not 1 <= indices.shape[-1] <= len(table.shape):
        raise ValueError(
            f"{what}: indices of shape {tuple(indices.shape)} name no places in "
            f"{table.described}. Their last dimension has 1 to {len(table.shape)} numbers for each "
            "place."
        )


def _check_here(table: PlacedTable, what: str, places: Array, dtype: np.dtype[Any]) -> None:
    if jax_private.is_tracer(places):
        check_kind(what, table.shape, table.described, dtype)
    else:
        check_places(what, table.shape, table.described, np.asarray(places))


def _check_values(
    table: PlacedTable, what: str, indices: Array, values: Array, expected: tuple[int, ...]
) -> None:
    if values.shape not in (expected, ()):
        raise ValueError(
            f"{what}: values of shape {tuple(values.shape)} with indices of shape "
            f"{tuple(indices.shape)} do not fit {table.described}. Expected values of shape "
            f"{expected}, or a scalar."
        )
    if not np.can_cast(values.dtype, table.dtype, "same_kind"):
        raise ValueError(
            f"{what}: values of data type {values.dtype.name} do not fit {table.described} of data "
            f"type {np.dtype(table.dtype).name}. Convert them first."
        )


def _write(table: PlacedTable, what: str, kind: WriteKind, indices: Array, values: Array) -> None:
    if kind is WriteKind.ASSIGN_SUB:
        kind, values = WriteKind.ASSIGN_ADD, -values
    if table.source is not None:
        _send(table, what, kind, indices, values)
    elif context_rules.is_written_together(table.row_shards[0][1]):
        _write_together(table, what, kind, indices, values)
    else:
        for start, variable in table.row_shards:
            _write_part(variable, kind, indices, values, start)


def _write_part(
    variable: PlacedVariable, kind: WriteKind, indices: Array, values: Array, start: int
) -> None:
    index = remote_writes.make_index(indices, variable.shape, start)
    context_rules.write(variable, values, kind, index)


_OF_ONE_REPLICA = (WriteKind.ASSIGN, WriteKind.MAX, WriteKind.MIN)
"""What TensorFlow lets replicas write only if one of them decides."""


def _write_together(
    table: PlacedTable, what: str, kind: WriteKind, indices: Array, values: Array
) -> None:
    """Writes rows of a mirrored table from all replicas at once: the rows of each, in turn."""
    variables = [variable for _, variable in table.row_shards]
    first, aggregation = variables[0], variables[0].aggregation
    context_rules.check_combinable(first, what)
    takes_first = aggregation is VariableAggregation.ONLY_FIRST_REPLICA
    if kind in _OF_ONE_REPLICA and not takes_first:
        raise NotImplementedError(
            f"{what}: {table.described} has aggregation={aggregation.name}, which does not say "
            "whose rows stay when several replicas write the same. Use "
            "aggregation=dx.VariableAggregation.ONLY_FIRST_REPLICA, or write it outside the "
            "replicas."
        )
    given = [frames.detach(jnp.asarray(each)) for each in (indices, values)]
    for each in given:
        context_rules.refuse_staged(first, each)

    def combine(strategy: contracts.Strategy, value: Any) -> Any:
        if not is_wrapped(value):
            count = 1 if takes_first else strategy.num_replicas_in_sync
            return jnp.concatenate([value] * count)
        if takes_first:
            return strategy.extended.first_value(value)
        return strategy.extended.gather_to(value, first, axis=0)

    def together(strategy: contracts.Strategy, indices: Any, values: Any) -> None:
        share = strategy.num_replicas_in_sync if aggregation is VariableAggregation.MEAN else 1

        def write(variable: PlacedVariable, indices: Array, values: Array, start: int) -> None:
            _write_part(variable, kind, indices, values / share if share > 1 else values, start)

        joined = combine(strategy, indices), combine(strategy, values)
        for start, variable in table.row_shards:
            strategy.extended.update(variable, write, args=(*joined, start))

    replica = context.get_replica_context()
    assert replica is not None
    replica.merge_call(together, args=tuple(given))
    for variable in variables:
        stand_in = overlay.find_overlay(variable)
        if stand_in is not None:
            overlay.replace(stand_in, variable, context_rules.read(variable))


def _send(table: PlacedTable, what: str, kind: WriteKind, indices: Array, values: Array) -> None:
    """Writes to a table that lives in another process: there, at once or after the step."""
    indices, values = frames.detach(indices), frames.detach(values).astype(table.dtype)
    # What stands in for the table, in a function that is being differentiated, changes as well.
    standing = [
        (stand_ins, start, variable, variable.read_value())
        for start, variable in table.row_shards
        if (stand_ins := overlay.find_overlay(variable)) is not None
    ]
    frame = frames.current()
    if frame is not None:
        frame.function.defer_rows(table, kind, jnp.asarray(indices), jnp.asarray(values))
    elif jax_private.is_tracer(indices) or jax_private.is_tracer(values):
        raise RuntimeError(
            f"{what}: {table.described} was given values of a JAX transformation that is still "
            "tracing. Use @dx.function instead of @jax.jit; for other transformations return the "
            "rows, and write them outside."
        )
    else:
        assert table.source is not None
        table.source.write_rows(table, kind, np.asarray(indices), np.asarray(values))
    for stand_ins, start, variable, old in standing:
        changed = remote_writes.scatter_rows(old, kind, indices, values, start)
        overlay.replace(stand_ins, variable, frames.detach(changed))
