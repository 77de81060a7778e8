"""Rows of a variable: reading and writing some of them, wherever the variable lives."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.execution import frames, lookup_gradients, overlay, row_lookups
from distribax.jax_private import jaxprs
from distribax.types import WriteKind
from distribax.values import ArrayLike, IndexedSlices
from distribax.variables import context_rules, row_writes
from distribax.variables.reference import Reference
from distribax.variables.row_writes import Array, to_array
from distribax.variables.sharded.division import Division, check_ids, check_kind, check_places

_R = TypeVar("_R", bound="RowAccess")


class RowAccess(ArrayLike):
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
        return Reference(self)

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

    def gather_nd(
        self, indices: jax.typing.ArrayLike | Sequence[object], name: str | None = None
    ) -> jax.Array:
        """Returns elements, or smaller arrays; of a server only the rows that have them are read.

        Args:
            indices: Integers; the `k` numbers along the last dimension are a place in the
                variable's first `k` dimensions.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            An array of shape `indices.shape[:-1] + self.shape[k:]`.

        Raises:
            ValueError: The indices are no places in the variable.
        """
        return gather_elements(self, indices, "gather_nd")

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
            NotImplementedError: Replicas write a mirrored variable, and its aggregation does not
                say whose rows stay.
        """
        row_writes.write_rows(self, "scatter_update", WriteKind.ASSIGN, sparse_delta)
        return self

    def scatter_add(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Adds to some rows; an index that occurs twice is added twice.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: As for `scatter_update`.
            name: As for `scatter_update`.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
        """
        row_writes.write_rows(self, "scatter_add", WriteKind.ASSIGN_ADD, sparse_delta)
        return self

    def scatter_sub(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Subtracts from some rows; an index that occurs twice is subtracted twice.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: As for `scatter_update`.
            name: As for `scatter_update`.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
        """
        row_writes.write_rows(self, "scatter_sub", WriteKind.ASSIGN_SUB, sparse_delta)
        return self

    def scatter_max(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Replaces the elements of some rows that are smaller than the given ones.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: Accepted as in TensorFlow; it changes nothing.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
            NotImplementedError: Replicas write a mirrored variable, and its aggregation does not
                say whose rows stay.
        """
        row_writes.write_rows(self, "scatter_max", WriteKind.MAX, sparse_delta)
        return self

    def scatter_min(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Replaces the elements of some rows that are larger than the given ones.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: Accepted as in TensorFlow; it changes nothing.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
            NotImplementedError: Replicas write a mirrored variable, and its aggregation does not
                say whose rows stay.
        """
        row_writes.write_rows(self, "scatter_min", WriteKind.MIN, sparse_delta)
        return self

    def scatter_mul(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Multiplies some rows; an index that occurs twice is multiplied twice.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: As for `scatter_update`.
            name: As for `scatter_update`.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
        """
        row_writes.write_rows(self, "scatter_mul", WriteKind.MUL, sparse_delta)
        return self

    def scatter_div(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Divides some rows; integers are rounded towards zero.

        Args:
            sparse_delta: The rows and their indices.
            use_locking: As for `scatter_update`.
            name: As for `scatter_update`.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or rows do not fit the variable.
        """
        row_writes.write_rows(self, "scatter_div", WriteKind.DIV, sparse_delta)
        return self

    def batch_scatter_update(
        self: _R,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> _R:
        """Replaces, in each array along the first dimensions, what its own indices name.

        With indices of shape `(b, n)`, `self[i, indices[i, j]]` becomes `values[i, j]`; with those
        of one dimension it is `scatter_update`.

        Args:
            sparse_delta: The indices, and values of `indices.shape + self.shape[indices.ndim:]`.
            use_locking: As for `scatter_update`.
            name: As for `scatter_update`.

        Returns:
            The variable itself.

        Raises:
            TypeError: `sparse_delta` is not a `dx.IndexedSlices`.
            ValueError: The indices or values do not fit the variable.
        """
        row_writes.write_batches(self, "batch_scatter_update", sparse_delta)
        return self

    def scatter_nd_update(
        self: _R,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> _R:
        """Replaces elements, or smaller arrays.

        Args:
            indices: As for `gather_nd`.
            updates: A value for each place, of `indices.shape[:-1] + self.shape[k:]`; or a scalar.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            ValueError: The indices or values do not fit the variable.
        """
        row_writes.write_elements(self, "scatter_nd_update", WriteKind.ASSIGN, indices, updates)
        return self

    def scatter_nd_add(
        self: _R,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> _R:
        """Adds to elements, or smaller arrays; a place that occurs twice is added to twice.

        Args:
            indices: As for `gather_nd`.
            updates: A value for each place, of `indices.shape[:-1] + self.shape[k:]`; or a scalar.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            ValueError: The indices or values do not fit the variable.
        """
        row_writes.write_elements(self, "scatter_nd_add", WriteKind.ASSIGN_ADD, indices, updates)
        return self

    def scatter_nd_sub(
        self: _R,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> _R:
        """Subtracts from elements, or smaller arrays.

        Args:
            indices: As for `gather_nd`.
            updates: A value for each place, of `indices.shape[:-1] + self.shape[k:]`; or a scalar.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            ValueError: The indices or values do not fit the variable.
        """
        row_writes.write_elements(self, "scatter_nd_sub", WriteKind.ASSIGN_SUB, indices, updates)
        return self

    def scatter_nd_max(
        self: _R,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> _R:
        """Replaces elements that are smaller than the given ones.

        Args:
            indices: As for `gather_nd`.
            updates: A value for each place, of `indices.shape[:-1] + self.shape[k:]`; or a scalar.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            ValueError: The indices or values do not fit the variable.
        """
        row_writes.write_elements(self, "scatter_nd_max", WriteKind.MAX, indices, updates)
        return self

    def scatter_nd_min(
        self: _R,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> _R:
        """Replaces elements that are larger than the given ones.

        Args:
            indices: As for `gather_nd`.
            updates: A value for each place, of `indices.shape[:-1] + self.shape[k:]`; or a scalar.
            name: Accepted as in TensorFlow; it changes nothing.

        Returns:
            The variable itself.

        Raises:
            ValueError: The indices or values do not fit the variable.
        """
        row_writes.write_elements(self, "scatter_nd_min", WriteKind.MIN, indices, updates)
        return self


# Reading.


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


def gather_elements(
    table: RowAccess, places: jax.typing.ArrayLike | Sequence[object], what: str
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


def _is_untouched(table: RowAccess) -> bool:
    """Tells whether the rows of the table are those that it has where it lives."""
    variables = [variable for _, variable in table.row_shards]
    frame = frames.current()
    if frame is not None and any(map(frame.function.deferred.has_written, variables)):
        return False
    return all(map(overlay.is_unread, variables)) and lookup_gradients.can_tap_rows(
        table, variables
    )
