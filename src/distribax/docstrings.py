"""Docstrings of methods that differ in their first lines only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Method = TypeVar("_Method", bound=Callable[..., object])


def explained_by(other: Callable[..., object]) -> Callable[[_Method], _Method]:
    """Adds the sections of another method's docstring (Args, Returns, Raises) to a method's own.

    Args:
        other: A method that takes the same arguments.
    """

    def add_sections(method: _Method) -> _Method:
        # Python leaves docstrings out if it is started with -OO.
        if method.__doc__ and other.__doc__:
            sections = other.__doc__[other.__doc__.index("Args:") :]
            method.__doc__ = f"{method.__doc__}\n\n        {sections}"
        return method

    return add_sections
