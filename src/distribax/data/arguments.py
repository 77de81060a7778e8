"""Checks of the arguments that a pipeline is written with."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from distribax.data.options import AUTOTUNE


def whole_number(value: Any, name: str) -> int:
    """Returns an integer argument as an int."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r} of type {type(value).__name__} is not a whole number."
        ) from None


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
