"""`TensorShape`: a shape of which some dimensions may be unknown."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import SupportsIndex, overload

from typing_extensions import override


class TensorShape(tuple[int | None, ...]):
    """A shape as TensorFlow has it: a tuple of sizes, None for a dimension that varies.

    A shape that is known in full can be used wherever JAX takes a shape. An unknown number of
    dimensions, TensorFlow's `TensorShape(None)`, does not exist here: JAX knows every rank.

    Args:
        dims: The sizes; None or -1 for a dimension that varies.

    Raises:
        TypeError: `dims` is not a list of sizes.
        ValueError: A size is negative, or `dims` is None.

    Example:
        >>> shape = TensorShape([None, 3])
        >>> shape.rank, shape.is_fully_defined(), shape.as_list()
        (2, False, [None, 3])
        >>> shape.is_compatible_with((5, 3))
        True
    """

    __slots__ = ()

    def __new__(cls, dims: Iterable[SupportsIndex | None] | SupportsIndex = ()) -> TensorShape:
        if dims is None:
            raise ValueError(
                "TensorShape: dims=None is a shape of unknown rank, which JAX does not have. Give "
                "the number of dimensions, with None for each size that varies: [None, None]."
            )
        given = dims if isinstance(dims, Iterable) else [dims]
        try:
            sizes = [None if size in (None, -1) else operator.index(size) for size in given]
        except TypeError:
            raise TypeError(
                f"TensorShape: dims={dims!r} is not a shape. Expected a list of sizes, with None "
                "for a dimension that varies."
            ) from None
        if any(size is not None and size < 0 for size in sizes):
            raise ValueError(
                f"TensorShape: dims={dims!r} has a negative size. Expected sizes of at least 0, or "
                "None (or -1) for a dimension that varies."
            )
        return super().__new__(cls, sizes)

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self)

    @property
    def ndims(self) -> int:
        """The number of dimensions."""
        return len(self)

    @property
    def dims(self) -> list[int | None]:
        """The sizes, None for a dimension that varies."""
        return list(self)

    def as_list(self) -> list[int | None]:
        """Returns the sizes as a list, None for a dimension that varies.

        Returns:
            The list.
        """
        return list(self)

    def num_elements(self) -> int | None:
        """Returns how many elements an array of this shape has.

        Returns:
            The number, or None if a dimension varies.
        """
        sizes = [size for size in self if size is not None]
        return math.prod(sizes) if len(sizes) == len(self) else None

    def is_fully_defined(self) -> bool:
        """Tells whether all sizes are known.

        Returns:
            False if a dimension varies.
        """
        return None not in self

    def is_compatible_with(self, other: Iterable[SupportsIndex | None]) -> bool:
        """Tells whether an array can have both shapes.

        Args:
            other: Another shape.

        Returns:
            Whether the ranks are the same, and so are the sizes that both know.
        """
        sizes = TensorShape(other)
        return len(sizes) == len(self) and all(
            one is None or two is None or one == two for one, two in zip(self, sizes, strict=True)
        )

    def merge_with(self, other: Iterable[SupportsIndex | None]) -> TensorShape:
        """Returns the shape with what both know.

        Args:
            other: Another shape.

        Returns:
            The merged shape.

        Raises:
            ValueError: No array can have both shapes.
        """
        sizes = TensorShape(other)
        if not self.is_compatible_with(sizes):
            raise ValueError(f"Shapes {self} and {sizes} are not compatible.")
        return TensorShape(
            two if one is None else one for one, two in zip(self, sizes, strict=True)
        )

    def concatenate(self, other: Iterable[SupportsIndex | None]) -> TensorShape:
        """Returns the dimensions of both shapes, one after the other.

        Args:
            other: Another shape.

        Returns:
            The longer shape.
        """
        return TensorShape((*self, *TensorShape(other)))

    @overload
    def __getitem__(self, key: SupportsIndex) -> int | None: ...
    @overload
    def __getitem__(self, key: slice) -> TensorShape: ...
    @override
    def __getitem__(self, key: SupportsIndex | slice) -> int | TensorShape | None:
        found = super().__getitem__(key)
        return TensorShape(found) if isinstance(found, tuple) else found

    @override
    def __str__(self) -> str:
        return f"({', '.join(map(str, self))}{',' if len(self) == 1 else ''})"

    @override
    def __repr__(self) -> str:
        return f"TensorShape({self.as_list()})"
