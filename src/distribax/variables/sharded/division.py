"""How the rows of a table are divided over its shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Division:
    """Which rows each shard has: shard `i` those from `starts[i]` up to `starts[i + 1]`."""

    starts: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Division:
        """Returns the division into shards of these numbers of rows."""
        return cls((0, *accumulate(sizes)))

    @classmethod
    def even(cls, num_rows: int, num_shards: int) -> Division:
        """Returns a division into shards of the same size, the first ones having a row more.

        >>> Division.even(10, 4).starts
        (0, 3, 6, 8, 10)
        """
        size, extra = divmod(num_rows, num_shards)
        return cls.of([size + 1] * extra + [size] * (num_shards - extra))

    @property
    def slices(self) -> list[slice]:
        """The rows of each shard."""
        return [slice(start, end) for start, end in pairwise(self.starts)]

    def split(self, ids: np.ndarray) -> Iterator[tuple[int, slice | np.ndarray, np.ndarray]]:
        """Yields each shard that has some of the rows: its index, where in `ids`, and its ids."""
        if not ids.size:
            return
        if len(self.starts) == 2:
            yield 0, slice(None), ids
            return
        shard_of = np.searchsorted(self.starts, ids, side="right") - 1
        for shard in range(len(self.starts) - 1):
            (places,) = np.nonzero(shard_of == shard)
            if len(places):
                yield shard, places, ids[places] - self.starts[shard]


def check_ids(what: str, shape: Sequence[int], described: str, ids: np.ndarray) -> None:
    """Raises if these are not indices of rows of a table of this shape."""
    check_kind(what, shape, described, ids.dtype)
    outside = (ids < 0) | (ids >= shape[0])
    if outside.any():
        place = [int(index) for index in np.argwhere(outside)[0]]
        raise ValueError(
            f"{what}: ids{place or ''} is {ids[tuple(place)]}, but {described} has the rows 0 to "
            f"{shape[0] - 1} ({int(outside.sum())} of {ids.size} ids are outside). Look at how the "
            "ids are made, or create the table with more rows."
        )


def check_places(what: str, shape: Sequence[int], described: str, indices: np.ndarray) -> None:
    """Raises if these are not indices of rows or, in two dimensions, places of elements."""
    if indices.ndim == 1:
        check_ids(what, shape, described, indices)
        return
    check_kind(what, shape, described, indices.dtype)
    outside = (indices < 0) | (indices >= np.asarray(shape[: indices.shape[1]]))
    if outside.any():
        line = int(np.argwhere(outside)[0][0])
        raise ValueError(
            f"{what}: indices[{line}] is {indices[line].tolist()}, which is no place in "
            f"{described}."
        )


def check_kind(what: str, shape: Sequence[int], described: str, dtype: np.dtype[Any]) -> None:
    """Raises if a table of this shape has no rows, or ids of this type cannot name them."""
    if not len(shape):
        raise ValueError(f"{what}: {described} is a scalar; it has no rows.")
    if np.dtype(dtype).kind not in "iu":
        raise ValueError(
            f"{what}: the ids for {described} have the data type {np.dtype(dtype).name}. Expected "
            "integers: ids.astype('int32')."
        )
