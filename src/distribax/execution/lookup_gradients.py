"""Gradients with respect to values that become known only while the function runs.

`jax.grad` differentiates with respect to arguments, which must be there beforehand. Of a table
that lives elsewhere only the rows that a function looks up are there, and only when it asks for
them. So each value passes a tap on its way in: the identity, whose backward pass notes the gradient
that arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from distribax import jax_private
from distribax.jax_private import jaxprs


class Taps:
    """The taps of one function that is differentiated.

    Args:
        token: A number that the function is differentiated with respect to; it makes JAX go back
            as far as the taps.
        tables: What is differentiated with respect to.
        variables: What the tables consist of.
        inflows: Where to note what went in.
    """

    def __init__(
        self,
        token: Any,
        tables: Iterable[Any],
        variables: Iterable[Any],
        inflows: list[Inflow],
    ) -> None:
        self._token = token
        self._trace = jax_private.get_trace(token)
        self._tables = frozenset(tables)
        self._variables = frozenset(variables)
        self._inflows = inflows

    def covers(self, table: Any) -> bool:
        """Tells whether the rows of `table` are differentiated with respect to."""
        return table in self._tables

    def covers_part(self, table: Any, variables: Iterable[Any]) -> bool:
        """Tells whether it is another table, of which `variables` are parts, that is covered."""
        return table not in self._tables and not self._variables.isdisjoint(variables)

    def tap(self, what: Any, value: Any, ids: Any = None) -> Any:
        """Returns `value`, to be used by the function; its gradient will be noted."""
        inflow = Inflow(what, ids)
        self._inflows.append(inflow)
        return self.run_inside(lambda: _tap(inflow)(value, self._token))

    def run_inside(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` at the level of the differentiated function, whatever it is in the middle of.

        A value that a loop in the function reads first is then the function's, not the loop's.
        """
        return jaxprs.run_in_trace(self._trace, fn)


class Inflow:
    """A value that went into a differentiated function, and its gradient once that is known.

    `what` is the variable; `ids` the rows of it, or None if it was read as a whole.
    """

    def __init__(self, what: Any, ids: Any) -> None:
        self.what = what
        self.ids = ids
        self.gradient: Any = None

    def note(self, gradient: Any) -> None:
        """Takes the gradient that the backward pass has arrived with."""
        assert self.gradient is None, "each tap is passed once"
        self.gradient = gradient


def _tap(inflow: Inflow) -> Any:
    @jax.custom_vjp
    def tap(value: Any, token: Any) -> Any:
        return value

    def forward(value: Any, token: Any) -> tuple[Any, None]:
        return value, None

    def backward(_: None, gradient: Any) -> tuple[Any, Any]:
        inflow.note(gradient)
        return gradient, jnp.zeros(())

    tap.defvjp(forward, backward)
    return tap


_open: ContextVar[tuple[Taps, ...]] = ContextVar("distribax_taps", default=())


@contextlib.contextmanager
def open_taps(taps: Taps) -> Iterator[None]:
    """Lets the rows that are looked up inside pass these taps."""
    token = _open.set((*_open.get(), taps))
    try:
        yield
    finally:
        _open.reset(token)


def can_tap_rows(table: Any, variables: Iterable[Any]) -> bool:
    """Tells whether rows of `table`, which consists of `variables`, can pass the open taps."""
    return not any(taps.covers_part(table, variables) for taps in _open.get())


def tap_rows(table: Any, rows: Any, ids: Any) -> Any:
    """Returns rows that were looked up, after the taps of all functions being differentiated."""
    for taps in _open.get():
        if taps.covers(table):
            rows = taps.tap(table, rows, ids)
    return rows
