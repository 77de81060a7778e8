"""Rows of a variable: reading and writing some of them, wherever the variable lives."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.execution import frames, lookup_gradients, overlay, remote_writes, row_lookups
from distribax.execution.roles import RoleArgument, list_objects
from distribax.jax_private import jaxprs
from distribax.types import WriteKind
from distribax.values import ArrayLike, IndexedSlices, Mirrored
from distribax.variables import context_rules
from distribax.variables.reference import Reference
from distribax.variables.sharded.division import Division, check_ids, check_kind

Array: TypeAlias = "jax.Array | np.ndarray"

_R = TypeVar("_R", bound="RowAccess")


class RowAccess(ArrayLike, RoleArgument):
    """TensorFlow's `sparse_read` and `scatter_*`, for variables."""

    @property
    @abc.abstractmethod
    @override
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""

    @property
    @abc.abstractmethod
    @override
    def dtype(self) -> np.dtype[Any]:
        """The data type of the value."""

    @property
    @abc.abstractmethod
    def source(self) -> contracts.Source | None:
        """Where the value is fetched from if it lives in another process, or None."""

    @property
    @abc.abstractmethod
    def described(self) -> str:
        """The variable as error messages name it."""

    @abc.abstractmethod
    def read_value(self) -> jax.Array:
        """Returns the value as an array."""

    @override
    def jax_type(self) -> Any:
        """Returns the type of the value, as `jax.typeof` does."""
        if jax_private.is_tracing():
            return super().jax_type()
        # Not read: that may take a message to a server, or a sum over replicas.
        return jax_private.make_array_type(self.shape, self.dtype)

    def ref(self: _R) -> Reference[_R]:
        """Returns a reference to the variable, to find it by identity among others.

        Returns:
            An object that equals the other references to this variable; `deref()` returns it.
        """
        self.note_identity()
        return Reference(self)

    @property
    @override
    def form(self) -> Hashable:
        """What code can know of it, but for its value and which one it is."""
        return (type(self), *map(_describe_form, self.states))

    @property
    @override
    def states(self) -> list[Any]:
        """The variables that it consists of."""
        return [variable for _, variable in self.row_shards]

    def note_identity(self) -> None:
        """Remembers that code which is being traced asks which variable it is."""
        frame = frames.current()
        if frame is not None:
            frame.function.identified.update(map(id, list_objects([self])))

    def get_shape(self) -> tuple[int, ...]:
        """Returns the shape of the value.

        Returns:
            The size of each dimension.
        """
        return self.shape

    @property
    def row_shards(self) -> list[tuple[int, Any]]:
        """The variables that have the rows, each with the number of its first row."""
        return [(0, self)]

    @property
    def division(self) -> Division:
        """Which rows each of them has."""
        return Division((0, self.shape[0]))

    def sparse_read(
        self, indices: jax.typing.ArrayLike | Sequence[object], name: str | None = None
    ) -> jax.Array:
        """Returns the rows that `indices` names; only they are fetched from a server.

        Args:
            indices: Integers of any shape.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            An array of shape `indices.shape + self.shape[1:]`.
        """
        return look_up(self, indices, "sparse_read")

    def scatter_add(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Adds to some rows; an index that occurs twice is added twice.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: Accepted as in TensorFlow; it changes nothing.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
        """
        indices, rows = _split(sparse_delta, "scatter_add")
        return self._write_rows("scatter_add", WriteKind.ASSIGN_ADD, indices, rows)

    def scatter_sub(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Subtracts from some rows; an index that occurs twice is subtracted twice.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: Accepted as in TensorFlow; it changes nothing.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
        """
        indices, rows = _split(sparse_delta, "scatter_sub")
        return self._write_rows("scatter_sub", WriteKind.ASSIGN_ADD, indices, -rows)

    def scatter_update(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Replaces some rows.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: Accepted as in TensorFlow; it changes nothing.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
        """
        indices, rows = _split(sparse_delta, "scatter_update")
        return self._write_rows("scatter_update", WriteKind.ASSIGN, indices, rows)

    def _write_rows(self: _R, what: str, kind: WriteKind, indices: Array, rows: Array) -> _R:
        _check_rows(self, what, indices, rows)
        if self.source is None:
            _write_here(self, kind, indices, rows)
        else:
            _send(self, what, kind, indices, rows)
        return self


# Reading.


def _describe_form(variable: Any) -> Hashable:
    placement = variable.placement
    return (
        *(type(variable), variable.shape, variable.dtype, variable.trainable),
        *(variable.distribute_strategy, variable.aggregation, variable.synchronization),
        *(type(placement), placement.devices, placement.sharding, placement.source),
        # Of functions and other objects: what is equal may still do something else.
        id(variable.constraint),
    )


def look_up(
    table: RowAccess, asked: jax.typing.ArrayLike | Sequence[object], what: str
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
        rows = table.source.rows([(table, ids)])[0]
    return lookup_gradients.tap_rows(table, rows, ids)


def take_rows(value: jax.Array, ids: Array, what: str, described: str) -> jax.Array:
    """Returns rows of an array that is here."""
    if jax_private.is_tracer(ids):
        check_kind(what, value.shape, described, ids.dtype)
    else:
        check_ids(what, value.shape, described, np.asarray(ids))
    return value.at[ids].get(mode="fill", wrap_negative_indices=False)


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


def _is_untouched(table: RowAccess) -> bool:
    """Tells whether the rows of the table are those that it has where it lives."""
    variables = [variable for _, variable in table.row_shards]
    frame = frames.current()
    if frame is not None and any(map(frame.function.deferred.has_written, variables)):
        return False
    return all(map(overlay.is_unread, variables)) and lookup_gradients.can_tap_rows(
        table, variables
    )


# Writing.


def _split(sparse: object, what: str) -> tuple[Array, Array]:
    if not isinstance(sparse, IndexedSlices):
        raise TypeError(
            f"{what}: sparse_delta={sparse!r} is not a dx.IndexedSlices. Pass the rows and their "
            "indices: dx.IndexedSlices(values, indices)."
        )
    return to_array(sparse.indices), to_array(sparse.values)


def _check_rows(table: RowAccess, what: str, indices: Array, rows: Array) -> None:
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


def _write_here(table: RowAccess, kind: WriteKind, indices: Array, rows: Array) -> None:
    for start, variable in table.row_shards:
        if kind is WriteKind.ASSIGN:
            changed = remote_writes.scatter_rows(variable.read_value(), kind, indices, rows, start)
            variable.assign(changed)
        else:
            zeros = jnp.zeros(variable.shape, variable.dtype)
            variable.assign_add(remote_writes.scatter_rows(zeros, kind, indices, rows, start))


def _send(table: RowAccess, what: str, kind: WriteKind, indices: Array, rows: Array) -> None:
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
        assert table.source is not None
        table.source.write_rows(table, kind, np.asarray(indices), np.asarray(rows))
    for values, start, variable, old in standing:
        changed = remote_writes.scatter_rows(old, kind, indices, rows, start)
        values[variable] = frames.detach(changed)
