"""Buckets of lengths, for batches of elements that need little padding."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distribax.data import elements
from distribax.data.plan.padding import PadTo


@dataclass(frozen=True)
class Buckets:
    """Ranges of lengths: below the first boundary, between two, from the last on."""

    length: Callable[..., Any]
    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    pad_to_boundary: bool

    def __post_init__(self) -> None:
        if len(self.batch_sizes) != len(self.boundaries) + 1:
            raise ValueError(
                f"bucket_batch_sizes has {len(self.batch_sizes)} sizes for "
                f"{len(self.boundaries)} bucket_boundaries. Expected one more size than boundaries."
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(
                f"bucket_boundaries={list(self.boundaries)} are not in ascending order."
            )

    @property
    def numbers(self) -> range:
        """The numbers of the buckets that elements may be in."""
        return range(len(self.boundaries) if self.pad_to_boundary else len(self.batch_sizes))

    def find(self, *element: Any) -> np.int64:
        """Returns the number of an element's bucket."""
        length = int(self.length(*element))
        bucket = bisect.bisect_right(self.boundaries, length)
        if self.pad_to_boundary and bucket == len(self.boundaries):
            raise ValueError(
                f"an element has the length {length}, but with pad_to_bucket_boundary=True all "
                f"must be shorter than the last of bucket_boundaries={list(self.boundaries)}."
            )
        return np.int64(bucket)

    def fill(self, shapes: Any, bucket: int) -> Any:
        """Returns padded shapes, with the longest length of the bucket where they say None."""
        if shapes is None or not self.pad_to_boundary:
            return shapes
        longest = self.boundaries[bucket] - 1

        def fill(shape: PadTo) -> PadTo:
            return PadTo(tuple(longest if dim is None else dim for dim in shape.dims))

        return elements.map_leaves(fill, shapes)
