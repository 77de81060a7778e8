"""Effects: what a compiled step does outside itself once it has run.

A variable that lives in another process is not replaced by a step, as others change it too: the
step's additions and gradients are sent to where it lives. While the step is traced they are noted;
their arrays become outputs of the program, and at each call they are handed over in one go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from distribax.types import WriteKind


class Sink(Protocol):
    """Where effects go, many at once."""

    def commit(self, kinds: list[Any], arrays: list[Any]) -> None:
        """Carries out effects in order, given what each is and its arrays (a nest)."""
        ...


@dataclass
class Effect:
    """One thing to do: where, what, and with which arrays (a nest)."""

    sink: Sink
    what: Any
    arrays: Any


@dataclass
class _Group:
    """The effects of a program that go to the same place, in order."""

    sink: Sink
    kinds: list[Any]


@dataclass
class Effects:
    """The effects of a program, learnt while it is traced."""

    groups: list[_Group] = field(default_factory=list)

    def take(self, effects: list[Effect]) -> list[Any]:
        """Splits effects into the arrays that the program returns and what they are for."""
        by_sink: dict[Any, list[Effect]] = {}
        for effect in effects:
            by_sink.setdefault(effect.sink, []).append(effect)
        self.groups = [_Group(sink, [each.what for each in own]) for sink, own in by_sink.items()]
        return [[each.arrays for each in own] for own in by_sink.values()]

    def commit(self, arrays: list[Any]) -> None:
        """Carries out the effects of one call."""
        for group, given in zip(self.groups, arrays, strict=True):
            group.sink.commit(group.kinds, given)


@dataclass(frozen=True)
class Write:
    """A write to a variable that lives elsewhere: ASSIGN or ASSIGN_ADD."""

    variable: Any
    kind: WriteKind


@dataclass(frozen=True)
class WriteRows:
    """A write to some rows of a table that lives elsewhere, its arrays being indices and rows."""

    table: Any
    kind: WriteKind


# The value of a variable after some writes, given how to read the one before.
State: TypeAlias = Callable[[Callable[[], Any]], Any]


class Deferred:
    """The effects that a trace has noted so far."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        # Where the last write to a variable is noted, for as long as another may join it.
        self._open: dict[Any, int] = {}
        self._states: dict[Any, State] = {}

    def write(self, variable: Any, kind: WriteKind, value: Any) -> None:
        """Notes a write; several to the same variable become one."""
        if kind is WriteKind.ASSIGN_SUB:
            kind, value = WriteKind.ASSIGN_ADD, -value
        if kind is WriteKind.ASSIGN:
            self._states[variable] = lambda _: value
        else:
            self._then(variable, lambda old: (old + value).astype(old.dtype))
        at = self._open.get(variable)
        if at is None:
            self._open[variable] = len(self.effects)
            self.effects.append(Effect(variable.source, Write(variable, kind), value))
            return
        noted = self.effects[at]
        kind, noted.arrays = _joined((noted.what.kind, noted.arrays), kind, value)
        noted.what = Write(variable, kind)

    def write_rows(self, table: Any, kind: WriteKind, indices: Any, rows: Any) -> None:
        """Notes a write to some rows of a table."""
        self.add(table.source, WriteRows(table, kind), (indices, rows))
        for start, variable in table.row_shards:
            change = partial(scatter_rows, kind=kind, indices=indices, rows=rows, start=start)
            self._then(variable, change)

    def _then(self, variable: Any, change: Callable[[Any], Any]) -> None:
        earlier = self._states.get(variable)
        if earlier is None:
            self._states[variable] = lambda read: change(read())
        else:
            self._states[variable] = lambda read: change(earlier(read))

    def add(self, sink: Sink, what: Any, arrays: Any) -> None:
        """Notes an effect of another kind; later writes come after it."""
        self._open.clear()
        self.effects.append(Effect(sink, what, arrays))

    def read_after(self, variable: Any, read: Any) -> Any:
        """Returns the variable's value after the step's own writes; `read()` is that before."""
        state = self._states.get(variable)
        return read() if state is None else state(read)

    def has_written(self, variable: Any) -> bool:
        """Tells whether the step has written the variable, or rows of it."""
        return variable in self._states


def scatter_rows(array: Any, kind: WriteKind, indices: Any, rows: Any, start: int) -> Any:
    """Returns an array with some rows written; it has the rows of a table from `start` on.

    Indices that it does not have are left out.
    """
    indices = jnp.asarray(indices)
    # Numbers of 8 bits cannot be subtracted from.
    wide = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
    at = array.at[wide - start]
    write = at.set if kind is WriteKind.ASSIGN else at.add
    return write(rows, mode="drop", wrap_negative_indices=False)


def _joined(earlier: tuple[WriteKind, Any], kind: WriteKind, value: Any) -> tuple[WriteKind, Any]:
    if kind is WriteKind.ASSIGN:
        return kind, value
    return earlier[0], (earlier[1] + value).astype(value.dtype)


def host_arrays(nest: Any) -> Any:
    """Returns a nest's arrays as the host sees them, without a copy where there need be none."""
    return jax.device_get(nest)
