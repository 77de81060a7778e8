"""Remote writes: what a compiled step sends to other processes after it has run.

A variable that lives in another process is not replaced by a step, as others change it too: the
step's additions and gradients are sent to where it lives. While the step is traced they are noted.
Their arrays become outputs of the program, and each call sends them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from distribax import contracts
from distribax.execution.state.role_arguments import Exchange
from distribax.types import WriteKind


@dataclass(frozen=True)
class Write:
    """A write to a variable that lives in another process: ASSIGN or ASSIGN_ADD."""

    variable: contracts.Variable
    kind: WriteKind


@dataclass(frozen=True)
class WriteRows:
    """A write to some rows of a table in another process; its arrays are indices and rows."""

    table: contracts.Table
    kind: WriteKind


@dataclass
class RemoteWrite:
    """One write: to where, of what kind, and with which arrays (a nest)."""

    sink: contracts.Sink
    what: object
    arrays: Any


@dataclass
class ProgramWrites:
    """The remote writes of a program, learnt while it is traced: by sink, their kinds, in order."""

    kinds: dict[contracts.Sink, list[object]] = field(default_factory=dict)

    def take(self, writes: Sequence[RemoteWrite]) -> list[list[Any]]:
        """Returns the arrays that the program returns for writes, and keeps what they are for."""
        by_sink: dict[contracts.Sink, list[RemoteWrite]] = {}
        for write in writes:
            by_sink.setdefault(write.sink, []).append(write)
        self.kinds = {sink: [each.what for each in own] for sink, own in by_sink.items()}
        return [[each.arrays for each in own] for own in by_sink.values()]

    def exchange(self, exchange: Exchange) -> ProgramWrites:
        """Returns the same writes to other variables."""
        return ProgramWrites(
            {
                sink: [_exchange(kind, exchange) for kind in kinds]
                for sink, kinds in self.kinds.items()
            }
        )

    def commit(self, arrays: Sequence[list[Any]]) -> None:
        """Sends the writes of one call."""
        for (sink, kinds), given in zip(self.kinds.items(), arrays, strict=True):
            sink.commit(kinds, given)


def _exchange(kind: object, exchange: Exchange) -> object:
    if isinstance(kind, Write):
        return Write(exchange(kind.variable), kind.kind)
    if isinstance(kind, WriteRows):
        return WriteRows(exchange(kind.table), kind.kind)
    # An optimizer's update. Code that has the optimizer can reach its variables.
    return kind


_Read: TypeAlias = Callable[[], jax.Array]

_Change: TypeAlias = Callable[[_Read], jax.Array]
"""Returns a variable's value after some writes, given how to read the one before."""


class RemoteWrites:
    """The remote writes that a trace has noted so far."""

    def __init__(self) -> None:
        self.writes: list[RemoteWrite] = []
        # The last write to a variable, for as long as another one may join it.
        self._open: dict[contracts.State, RemoteWrite] = {}
        self._changes: dict[contracts.State, _Change] = {}

    def write(self, variable: contracts.Variable, kind: WriteKind, value: jax.Array) -> None:
        """Notes a write; several to the same variable become one."""
        if kind is WriteKind.ASSIGN_SUB:
            kind, value = WriteKind.ASSIGN_ADD, -value
        if kind is WriteKind.ASSIGN:
            self._changes[variable] = lambda _: value
        else:
            self._add_change(variable, lambda old: (old + value).astype(old.dtype))
        if variable not in self._open:
            assert variable.source is not None
            write = RemoteWrite(variable.source, Write(variable, kind), value)
            self.writes.append(write)
            self._open[variable] = write
            return
        write = self._open[variable]
        if kind is WriteKind.ASSIGN:
            write.what, write.arrays = Write(variable, kind), value
        else:
            write.arrays = (write.arrays + value).astype(value.dtype)

    def write_rows(
        self, table: contracts.Table, kind: WriteKind, indices: jax.Array, rows: jax.Array
    ) -> None:
        """Notes a write to some rows of a table."""
        assert table.source is not None
        self.add(table.source, WriteRows(table, kind), (indices, rows))
        for start, variable in table.row_shards:
            change = partial(scatter_rows, kind=kind, indices=indices, rows=rows, start=start)
            self._add_change(variable, change)

    def _add_change(
        self, variable: contracts.State, change: Callable[[jax.Array], jax.Array]
    ) -> None:
        earlier = self._changes.get(variable)
        if earlier is None:
            self._changes[variable] = lambda read: change(read())
        else:
            self._changes[variable] = lambda read: change(earlier(read))

    def add(self, sink: contracts.Sink, what: object, arrays: object) -> None:
        """Notes a write of another kind; later ones come after it."""
        self._open.clear()
        self.writes.append(RemoteWrite(sink, what, arrays))

    def read_after(self, state: contracts.State, read: Callable[[], Any]) -> Any:
        """Returns a variable's value after the step's own writes; `read()` is that before."""
        change = self._changes.get(state)
        return read() if change is None else change(read)

    def has_written(self, state: contracts.State) -> bool:
        """Tells whether the step has written a variable, or rows of it."""
        return state in self._changes


def scatter_rows(
    array: jax.Array, kind: WriteKind, indices: ArrayLike, rows: ArrayLike, start: int
) -> jax.Array:
    """Returns an array with some rows written; its first row is row `start` of the table.

    Indices that it does not have are left out.
    """
    return change_part(array, kind, make_index(indices, array.shape, start), jnp.asarray(rows))


def make_index(indices: ArrayLike, shape: Sequence[int], start: int) -> tuple[jax.Array, ...]:
    """Returns an index of an array for rows, or elements, of a table that it is a part of.

    Args:
        indices: Numbers of rows; or, in two dimensions, the place of an element (or of a smaller
            array) in each line.
        shape: The shape of the array.
        start: Which row of the table its first row is.

    Returns:
        An index for `array.at[...]`, which writes nothing where the array has no such element.
    """
    indices = jnp.asarray(indices)
    # Numbers of 8 bits cannot be subtracted from.
    wide = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    first, *others = [wide] if wide.ndim == 1 else wide.T
    return tuple(
        # JAX would count those below zero from the end.
        jnp.where(place < 0, size, place)
        for place, size in zip((first - start, *others), shape, strict=False)
    )


def change_part(array: jax.Array, kind: WriteKind, index: Any, value: jax.Array) -> jax.Array:
    """Returns an array of which a part is written; elements that occur twice are written twice."""
    part = array.at[index]
    match kind:
        case WriteKind.ASSIGN:
            return part.set(value)
        case WriteKind.ASSIGN_ADD:
            return part.add(value)
        case WriteKind.ASSIGN_SUB:
            return part.add(-value)
        case WriteKind.MAX:
            return part.max(value)
        case WriteKind.MIN:
            return part.min(value)
        case WriteKind.MUL:
            return part.multiply(value)
        case WriteKind.DIV:
            # Integers stay integers, rounded towards zero.
            return jax.lax.div(array, jnp.ones_like(array).at[index].multiply(value))
