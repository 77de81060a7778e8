"""Checks of the arguments that a pipeline is written with."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike as DTypeLike

from distribax.data.dataset_options import AUTOTUNE

Path: TypeAlias = str | bytes | os.PathLike[str]
"""The name of a file."""

_Fn = TypeVar("_Fn", bound=Callable[..., Any])


def whole_number(value: object, name: str) -> int:
    """Returns an integer argument as an int."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError  # An index for Python, a mistake for a number of elements.
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{name}={value!r} of type {type(value).__name__} is not a whole number."
        ) from None


def flag(value: object, name: str) -> bool:
    """Returns an argument that must be True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} of type {type(value).__name__} is not True or False.")
    return bool(value)


def dtype(value: DTypeLike, name: str) -> np.dtype[Any]:
    """Returns a data type; text is kept as bytes objects, as tf.data's NumPy iterators give it."""
    if any(value is text or value == text for text in (str, bytes, "string")):
        return np.dtype(object)
    try:
        return np.dtype(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is not a data type. Expected one such as np.float32 or 'int64'."
        ) from None


def dims(value: Iterable[SupportsIndex | None], name: str) -> tuple[int | None, ...]:
    """Returns the sizes of a shape; None for those that vary."""
    sizes = tuple(None if dim in (None, -1) else operator.index(dim) for dim in value)
    if any(size is not None and size < 0 for size in sizes):
        raise ValueError(
            f"{name}={value!r} has a negative dimension. Expected sizes, or None (or -1) for a "
            "dimension that varies."
        )
    return sizes


def path(value: Path, name: str) -> str:
    """Returns the name of a file."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} of type {type(value).__name__} is not a file name."
        ) from None


def paths(value: Path | Iterable[Path], name: str) -> list[str]:
    """Returns one file name or several as a list."""
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Iterable):
        return [path(value, name)]
    return [path(item, name) for item in value]


def positive(value: object, name: str) -> int:
    """Returns an argument that must be at least 1."""
    number = whole_number(value, name)
    if number < 1:
        raise ValueError(f"{name}={number} is too small. Expected at least 1.")
    return number


def buffer_size(value: object, name: str) -> int:
    """Returns the size of a prefetch buffer; None means AUTOTUNE."""
    number = AUTOTUNE if value is None else whole_number(value, name)
    if number < AUTOTUNE:
        raise ValueError(
            f"{name}={number} is negative. Expected 0 (no prefetching) or more, or "
            "dx.data.AUTOTUNE to leave it to the library."
        )
    return number


def num_threads(value: object, name: str) -> int | None:
    """Returns a number of threads: None, AUTOTUNE or at least 1."""
    if value is None:
        return None
    number = whole_number(value, name)
    if number < 1 and number != AUTOTUNE:
        raise ValueError(
            f"{name}={number} is no number of threads. Expected None, at least 1, or "
            "dx.data.AUTOTUNE to leave it to the library."
        )
    return number


def function(value: _Fn, name: str) -> _Fn:
    """Returns an argument that must be callable."""
    if not callable(value):
        raise TypeError(f"{name}={value!r} of type {type(value).__name__} is not a function.")
    return value
