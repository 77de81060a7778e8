"""The shapes and dtypes of a data set's elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from distribax.data import arguments as check
from distribax.data import elements

Spec: TypeAlias = object
"""A nest of TensorSpecs."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one component of an element; a dimension of None may vary.

    Args:
        shape: The sizes; None or -1 for a dimension that varies.
        dtype: The data type; `str` or `bytes` for text.

    Raises:
        TypeError: The shape or the data type is none.
        ValueError: A size is negative.

    >>> TensorSpec([None, 3], np.float32)
    TensorSpec(shape=(None, 3), dtype=dtype('float32'))
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]

    def __init__(
        self, shape: Iterable[SupportsIndex | None] = (), dtype: check.DTypeLike = np.float32
    ) -> None:
        try:
            dims = check.dims(shape, "shape")
        except TypeError:
            raise TypeError(
                f"shape={shape!r} is not a shape. Expected a list or tuple of sizes, with None "
                "for a dimension that varies."
            ) from None
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "dtype", check.dtype(dtype, "dtype"))

    def is_compatible_with(self, value: elements.Leaf | TensorSpec) -> bool:
        """Tells whether an array (or another spec) has this dtype and a shape that fits.

        Args:
            value: The array or spec.

        Returns:
            Whether it fits. A dimension of None fits any size.
        """
        shape = value.shape if isinstance(value, TensorSpec) else np.shape(value)
        dtype = value.dtype if isinstance(value, TensorSpec) else elements.get_dtype(value)
        return (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(
                mine is None or its is None or mine == its
                for mine, its in zip(self.shape, shape, strict=True)
            )
        )


@dataclass(frozen=True, init=False)
class DatasetSpec(TensorSpec):
    """Describes a component that is a data set, such as a window.

    Args:
        element_spec: The nest of TensorSpecs of the elements of that data set.
    """

    element_spec: Spec

    def __init__(self, element_spec: Spec) -> None:
        super().__init__((), object)
        object.__setattr__(self, "element_spec", element_spec)


def find_spec(element: elements.Element) -> Spec:
    """Returns the nest of TensorSpecs that describes one element exactly."""
    return elements.map_leaves(_find_leaf_spec, element)


def _find_leaf_spec(leaf: Any) -> TensorSpec:
    if isinstance(leaf, elements.DatasetLeaf):
        return DatasetSpec(leaf.element_spec)  # type: ignore[attr-defined]
    return TensorSpec(np.shape(leaf), elements.get_dtype(leaf))


def merge_specs(first: Spec, second: Spec) -> Spec:
    """Returns the spec that covers two specs: dimensions that differ become None."""

    def merge(one: TensorSpec, two: TensorSpec) -> TensorSpec:
        if not isinstance(two, TensorSpec):
            raise TypeError(f"elements of different structures in one data set: {one} and {two}.")
        if isinstance(one, DatasetSpec) and isinstance(two, DatasetSpec):
            return DatasetSpec(merge_specs(one.element_spec, two.element_spec))
        if one.dtype != two.dtype or len(one.shape) != len(two.shape):
            raise TypeError(
                f"elements of different types in one data set: {one} and {two}. Convert them "
                "to one dtype and rank with map."
            )
        pairs = zip(one.shape, two.shape, strict=True)
        return TensorSpec([a if a == b else None for a, b in pairs], one.dtype)

    return elements.map_leaves(merge, first, second)


def add_batch_dim(spec: Spec, size: int | None) -> Spec:
    """Returns the spec of a batch of such elements."""
    return elements.map_leaves(lambda leaf: TensorSpec((size, *leaf.shape), leaf.dtype), spec)


def resize_batch_dim(spec: Spec, size: int | None) -> Spec:
    """Returns the spec of such batches with another number of rows; None if it may vary."""
    return elements.map_leaves(
        lambda leaf: TensorSpec((size, *leaf.shape[1:]), leaf.dtype) if leaf.shape else leaf, spec
    )


def remove_batch_dim(spec: Spec) -> Spec:
    """Returns the spec of one row of such a batch."""

    def strip(leaf: TensorSpec) -> TensorSpec:
        if not leaf.shape:
            raise ValueError(
                f"unbatch needs components with a batch dimension, but one has the spec {leaf}."
            )
        return TensorSpec(leaf.shape[1:], leaf.dtype)

    return elements.map_leaves(strip, spec)


def resize_varying(element: elements.Element, spec: Spec) -> elements.Element | None:
    """Returns an element of other sizes in the dimensions that vary; None if none does."""
    varies = False

    def resize(leaf: np.ndarray[Any, Any], leaf_spec: TensorSpec) -> np.ndarray[Any, Any]:
        nonlocal varies
        for axis, dim in enumerate(leaf_spec.shape):
            if dim is None:
                varies = True
                leaf = _resize_axis(leaf, axis)
        return leaf

    other = elements.map_leaves(resize, element, spec)
    return other if varies else None


def _resize_axis(leaf: np.ndarray[Any, Any], axis: int) -> np.ndarray[Any, Any]:
    size = leaf.shape[axis]
    if size > 1:
        return leaf.take(range(size - 1), axis)
    if size == 1:
        return np.repeat(leaf, 2, axis)
    shape = (*leaf.shape[:axis], 1, *leaf.shape[axis + 1 :])
    return np.full(shape, b"", object) if leaf.dtype.hasobject else np.zeros(shape, leaf.dtype)


def infer_spec(
    spec_for: Callable[[elements.Element], Spec], sample: elements.Element, given: Spec
) -> Spec:
    """Returns what a function makes of specs, by running it on `sample` and on other sizes.

    The second run tells which dimensions of the result vary with those of the argument.
    """
    result = spec_for(sample)
    other = resize_varying(sample, given)
    if other is None:
        return result
    try:
        second = spec_for(other)
    except Exception:
        # A function for just this size, such as a reshape to a fixed shape.
        return result
    return merge_specs(result, second)


def make_zeros(spec: Spec) -> elements.Element:
    """Returns an element of zeros that fits a spec, with 1 for dimensions that vary."""

    def make(leaf: TensorSpec) -> elements.Leaf:
        if leaf.dtype == object and not leaf.shape:
            return b""
        shape = tuple(1 if dim is None else dim for dim in leaf.shape)
        if leaf.dtype == object:
            return np.full(shape, b"", object)
        return np.zeros(shape, leaf.dtype)[()]

    return elements.map_leaves(make, spec)
