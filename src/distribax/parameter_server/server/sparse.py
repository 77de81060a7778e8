"""Rows of a table: summed by index, gathered, and padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from distribax.parameter_server.protocol.operations import Array
from distribax.topology.host_memory import make_aligned
from distribax.types import WriteKind

_FEW: Final = 16


@dataclass(frozen=True)
class RowSet:
    """Rows, and where they belong; the indices are distinct and in ascending order."""

    indices: Array
    rows: Array


def sum_rows(indices: Array, rows: Array) -> RowSet:
    """Returns one row per index: the sum of its rows."""
    order = np.argsort(indices)
    ascending = indices[order]
    starts = _find_starts(ascending)
    sums = np.take(rows, order[starts], axis=0)
    counts = np.diff(starts, append=len(indices))
    # The second row of each index, then the third, and so on: a sum of large arrays is much faster
    # than what NumPy offers for groups. Few indices that occur often are summed one by one.
    left = np.flatnonzero(counts > 1)
    done = 1
    while len(left) > _FEW:
        sums[left] += rows[order[starts[left] + done]]
        done += 1
        left = left[counts[left] > done]
    for place in left:
        start = starts[place]
        sums[place] += np.add.reduce(rows[order[start + done : start + counts[place]]], axis=0)
    return RowSet(ascending[starts], sums)


def scatter(value: Array, kind: WriteKind, indices: Array, updates: Array) -> RowSet:
    """Returns the rows of a table that change when some rows, or elements, are written."""
    if indices.ndim == 1 and kind is WriteKind.ASSIGN:
        # The old rows are not needed. Of an index that occurs twice, the last row stays.
        distinct, last = np.unique(indices[::-1], return_index=True)
        return RowSet(distinct, updates[::-1][last])
    if indices.ndim == 1 and kind is WriteKind.ASSIGN_ADD:
        # Much faster than NumPy's `add.at`.
        added = sum_rows(indices, updates)
        old = np.take(value, added.indices, axis=0)
        return RowSet(added.indices, old + added.rows)
    places = indices[:, None] if indices.ndim == 1 else indices
    touched, of_row = np.unique(places[:, 0], return_inverse=True)
    rows = np.take(value, touched, axis=0)
    index = (of_row.reshape(-1), *places[:, 1:].T)
    match kind:
        case WriteKind.ASSIGN:
            rows[index] = updates
        case WriteKind.DIV:
            divisors = np.ones_like(rows)
            np.multiply.at(divisors, index, updates)
            rows = _divide(rows, divisors)
        case _:
            _CHANGES[kind].at(rows, index, updates)
    return RowSet(touched, rows)


_CHANGES: Final[dict[WriteKind, np.ufunc]] = {
    WriteKind.ASSIGN_ADD: np.add,
    WriteKind.MAX: np.maximum,
    WriteKind.MIN: np.minimum,
    WriteKind.MUL: np.multiply,
}


def _divide(rows: Array, divisors: Array) -> Array:
    """Returns a quotient of the same data type; integers are rounded towards zero."""
    if rows.dtype.kind not in "iu":
        return rows / divisors
    below = rows // divisors
    return below + ((rows % divisors != 0) & ((rows < 0) != (divisors < 0))).astype(rows.dtype)


def gather_rows(value: Array, indices: Array) -> Array:
    """Returns a copy of some rows of a table, and zeros up to the padded count."""
    rows = _allocate_rows(len(indices), value)
    np.take(value, indices, axis=0, out=rows[: len(indices)], mode="clip")
    return rows


def pad_rows(rows: Array) -> Array:
    """Returns a copy of rows, and zeros up to the padded count."""
    copy = _allocate_rows(len(rows), rows)
    copy[: len(rows)] = rows
    return copy


def _allocate_rows(count: int, like: Array) -> Array:
    """Returns memory for so many rows, rounded up to a power of two, the rest filled with zeros."""
    room = make_aligned((1 << max(0, count - 1).bit_length(), *like.shape[1:]), like.dtype)
    room[count:] = 0
    return room


def _find_starts(ascending: Array) -> Array:
    """Returns where in a sorted array another number begins."""
    new = np.ones(len(ascending), bool)
    np.not_equal(ascending[1:], ascending[:-1], out=new[1:])
    return np.flatnonzero(new)
