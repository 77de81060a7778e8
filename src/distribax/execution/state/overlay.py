"""Overlays: values that stand in for variables while a function of them is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeAlias

import jax

from distribax import context, contracts, jax_private

Overlay: TypeAlias = dict[Hashable, "jax.Array | Unread"]
"""The values that stand in for some variables."""


class Unread:
    """Stands in for a variable until it is read; then `make` says what does."""

    def __init__(self, make: Callable[[], jax.Array]) -> None:
        self.make = make


_overlays: ContextVar[tuple[tuple[context.Entry, Overlay], ...]] = ContextVar(
    "distribax_overlays", default=()
)


@contextlib.contextmanager
def lay_over(values: Mapping[contracts.Variable, jax.Array | Unread]) -> Iterator[None]:
    """Makes the given variables read as the given values: here, and in replicas run here."""
    overlay: Overlay = dict(values.items())
    token = _overlays.set((*_overlays.get(), (context.current(), overlay)))
    jax_private.forget_closures()
    try:
        yield
    finally:
        jax_private.forget_closures()
        _overlays.reset(token)


def find_stand_in(variable: Hashable) -> jax.Array | None:
    """Returns the value that stands in for `variable` where the code runs now, or None."""
    values = find_overlay(variable)
    if values is not None:
        return _read(values, variable)
    if context.get_replica_context() is None:
        return None
    # A replica that the differentiated function runs: its copy is one of the stand-in.
    for _, enclosing in reversed(_overlays.get()):
        if variable in enclosing:
            return _read(enclosing, variable)
    return None


def _read(values: Overlay, variable: Hashable) -> jax.Array:
    value = values[variable]
    if isinstance(value, Unread):
        value = values[variable] = value.make()
    return value


def replace(values: Overlay, variable: contracts.State, value: jax.Array) -> None:
    """Makes a variable that has been written read as `value`.

    As in TensorFlow, the gradient with respect to the variable counts what is read after it is
    written, too. That it has been written with does not depend on it.

    Args:
        values: The overlay that has a value for the variable.
        variable: The variable.
        value: What it has been written with.
    """
    values[variable] = _with_gradient_of(value, _read(values, variable))


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, source: jax.Array) -> jax.Array:
    return value


@_with_gradient_of.defjvp
def _(primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    return _with_gradient_of(*primals), tangents[1]


def is_unread(variable: contracts.State) -> bool:
    """Tells whether nothing stands in for `variable` that has been read or written already."""
    values = (values.get(variable) for _, values in _overlays.get())
    return all(value is None or isinstance(value, Unread) for value in values)


def find_overlay(variable: Hashable) -> Overlay | None:
    """Returns the innermost overlay of this context that has a value for `variable`, or None."""
    overlays = _overlays.get()
    if not overlays:
        return None
    here = context.current()
    for entry, values in reversed(overlays):
        # A merge function runs across replicas, where a replica's stand-in has no meaning.
        if entry is here and variable in values:
            return values
    return None
