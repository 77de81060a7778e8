"""Checks of the arguments that a pipeline is written with."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from distribax.data.dataset_options import AUTOTUNE


def whole_number(value: Any, name: str) -> int:
    """Returns an integer argument as an int."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError  # An index for Python, a mistake for a number of elements.
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} of type {type(value).__name__} is not a whole number."
        ) from None


def flag(value: Any, name: str) -> bool:
    """Returns an argument that must be True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} of type {type(value).__name__} is not True or False.")
    return bool(value)


def dtype(value: Any, name: str) -> np.dtype[Any]:
    """Returns a data type; text is kept as bytes objects, as tf.data's NumPy iterators give it."""
    if any(value is text or value == text for text in (str, bytes, "string")):
        return np.dtype(object)
    try:
        return np.dtype(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} is not a data type. Expected one such as np.float32 or 'int64'."
        ) from None


def path(value: Any, name: str) -> str:
    """Returns the name of a file."""
    try:
        return os.fsdecode(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} of type {type(value).__name__} is not a file name."
        ) from None


def paths(value: Any, name: str) -> list[str]:
    """Returns one file name or several as a list."""
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, Iterable):
        return [path(value, name)]
    return [path(item, name) for item in value]


def positive(value: Any, name: str) -> int:
    """Returns an argument that must be at least 1."""
    number = whole_number(value, name)
    if number < 1:
        raise ValueError(f"{name}={number} is too small. Expected at least 1.")
    return number


def buffer_size(value: Any, name: str) -> int:
    """Returns the size of a prefetch buffer; None stands for AUTOTUNE."""
    number = AUTOTUNE if value is None else whole_number(value, name)
    if number < AUTOTUNE:
        raise ValueError(
            f"{name}={number} is negative. Expected 0 (no prefetching) or more, or "
            "dx.data.AUTOTUNE to leave it to the library."
        )
    return number


def num_threads(value: Any, name: str) -> int | None:
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


def function(value: Any, name: str) -> Callable[..., Any]:
    """Returns an argument that must be callable."""
    if not callable(value):
        raise TypeError(f"{name}={value!r} of type {type(value).__name__} is not a function.")
    return value
