"""Rows of a variable: reading and writing some of them, wherever the variable lives."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import Any, Self

import jax
from typing_extensions import override

from distribax import contracts, jax_private
from distribax.execution import frames
from distribax.execution.state.role_arguments import RoleArgument, list_objects
from distribax.types import WriteKind
from distribax.values import ArrayLike, IndexedSlices
from distribax.variables import row_reads, row_writes
from distribax.variables.placement import PlacedVariable
from distribax.variables.reference import Reference
from distribax.variables.sharded.division import Division


class RowAccess(ArrayLike, RoleArgument):
    """TensorFlow's `sparse_read` and `scatter_*`, for variables."""

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

    def value(self) -> jax.Array:
        """Returns the value as an array, like `read_value`."""
        return self.read_value()

    @override
    def __jax_array__(self) -> jax.Array:
        return self.read_value()

    @override
    def jax_type(self) -> Any:
        """Returns the type of the value, as `jax.typeof` does."""
        if jax_private.is_tracing():
            return super().jax_type()
        # Not read: that may take a message to a server, or a sum over replicas.
        return jax_private.make_array_type(self.shape, self.dtype)

    def ref(self) -> Reference[Self]:
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
        return (type(self), *(_describe_form(variable) for _, variable in self.row_shards))

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
    @abc.abstractmethod
    def row_shards(self) -> Sequence[tuple[int, PlacedVariable]]:
        """The variables that have the rows, each with the number of its first row."""

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
        return row_reads.look_up(self, indices, "sparse_read")

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
        return row_reads.gather_elements(self, indices, "gather_nd")

    def scatter_update(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
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
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
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
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
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
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
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
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
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
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
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
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
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
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Self:
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
        self,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> Self:
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
        self,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> Self:
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
        self,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> Self:
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
        self,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> Self:
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
        self,
        indices: jax.typing.ArrayLike | Sequence[object],
        updates: jax.typing.ArrayLike | Sequence[object],
        name: str | None = None,
    ) -> Self:
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


def _describe_form(variable: PlacedVariable) -> Hashable:
    placement = variable.placement
    return (
        *(type(variable), variable.shape, variable.dtype, variable.trainable),
        *(variable.distribute_strategy, variable.aggregation, variable.synchronization),
        *(type(placement), placement.devices, placement.sharding, placement.source),
        # Of functions and other objects: what is equal may still do something else.
        id(variable.constraint),
    )
