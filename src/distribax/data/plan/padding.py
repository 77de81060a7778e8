"""The shape that padded_batch brings a component to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distribax.data import arguments as check
from distribax.data import elements


@dataclass(frozen=True)
class PadTo:
    """A target shape; None takes the largest size found in the batch."""

    dims: tuple[int | None, ...]

    def target(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the common shape of components with these shapes."""
        for shape in shapes:
            if len(shape) != len(self.dims):
                raise ValueError(
                    f"padded_batch was told to pad to {len(self.dims)} dimensions "
                    f"{list(self.dims)}, but a component has the shape {list(shape)}."
                )
        sizes: list[int] = []
        for axis, dim in enumerate(self.dims):
            largest = max(shape[axis] for shape in shapes)
            if dim is not None and largest > dim:
                raise ValueError(
                    f"padded_shapes says {dim} in dimension {axis}, but a component has "
                    f"{largest} there. Raise it, or use None for the largest of each batch."
                )
            sizes.append(largest if dim is None else dim)
        return tuple(sizes)


def parse_padded_shapes(shapes: object, name: str = "padded_shapes") -> Any:
    """Turns a user's nest of shapes into a nest of PadTo.

    A shape is a list, or a tuple of sizes; a tuple that holds anything else is a nest.
    """
    if isinstance(shapes, dict):
        return {key: parse_padded_shapes(shape, name) for key, shape in shapes.items()}
    if isinstance(shapes, (list, tuple)) and not elements.is_namedtuple(shapes):
        if all(dim is None or isinstance(dim, (int, np.integer)) for dim in shapes):
            return PadTo(check.dims(shapes, name))
        if isinstance(shapes, tuple):
            return tuple(parse_padded_shapes(shape, name) for shape in shapes)
    if isinstance(shapes, tuple):  # A named tuple.
        return type(shapes)(*(parse_padded_shapes(shape, name) for shape in shapes))
    raise TypeError(
        f"{name}={shapes!r} is not understood. Expected a shape such as [None] or (3, -1) "
        "for every component, in the structure of the elements."
    )
