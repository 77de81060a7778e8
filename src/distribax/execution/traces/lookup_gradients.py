"""Gradients with respect to values that become known only while the function runs.

`jax.grad` differentiates with respect to arguments, which must be known beforehand. Of a table in
another process only the rows that a function looks up are fetched, and only when it asks for them.
So each value is marked on its way in: it passes an identity function, whose backward pass notes the
gradient that arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from distribax import contracts, jax_private
from distribax.context.scoped import set_within
from distribax.jax_private import jaxprs

_T = TypeVar("_T")


@dataclass(eq=False)
class Inflow:
    """A value that went into a differentiated function, and its gradient once that is known.

    Attributes:
        what: The variable, or the table.
        ids: The rows of it that went in, or None if it was read as a whole.
        gradient: The gradient, once the backward pass has arrived.
    """

    what: contracts.Table
    ids: ArrayLike | None
    gradient: jax.Array | None = None

    def note(self, gradient: jax.Array) -> None:
        """Keeps the gradient that the backward pass has arrived with."""
        assert self.gradient is None, "each value is marked once"
        self.gradient = gradient


class LookupGradients:
    """The gradients of one function with respect to what it looks up while it runs.

    Args:
        token: A number that the function is differentiated with respect to; it makes JAX go back
            as far as the marked values.
        tables: What is differentiated with respect to.
        variables: What the tables consist of.
        inflows: The list to which the values that went in are added.
    """

    def __init__(
        self,
        token: jax.Array,
        tables: Iterable[contracts.Table],
        variables: Iterable[contracts.Variable],
        inflows: list[Inflow],
    ) -> None:
        self._token = token
        self._trace = jax_private.get_trace(token)
        self._tables = frozenset(tables)
        self._variables = frozenset(variables)
        self._inflows = inflows

    def covers(self, table: contracts.Table) -> bool:
        """Tells whether the rows of `table` are differentiated with respect to."""
        return table in self._tables

    def covers_part(self, table: contracts.Table, variables: Iterable[contracts.Variable]) -> bool:
        """Tells whether it is another table, of which `variables` are parts, that is covered."""
        return table not in self._tables and not self._variables.isdisjoint(variables)

    def mark(
        self, what: contracts.Table, value: jax.Array, ids: ArrayLike | None = None
    ) -> jax.Array:
        """Returns `value` for the function to use; its gradient will be noted."""
        inflow = Inflow(what, ids)
        self._inflows.append(inflow)
        return self.run_inside(lambda: _make_identity(inflow)(value, self._token))

    def run_inside(self, fn: Callable[[], _T]) -> _T:
        """Runs `fn` at the level of the differentiated function, even from a loop inside of it.

        A value that a loop in the function reads first is then the function's, not the loop's.
        """
        return jaxprs.run_in_trace(self._trace, fn)


def _make_identity(inflow: Inflow) -> Callable[[jax.Array, jax.Array], jax.Array]:
    @jax.custom_vjp
    def identity(value: jax.Array, token: jax.Array) -> jax.Array:
        return value

    def forward(value: jax.Array, token: jax.Array) -> tuple[jax.Array, None]:
        return value, None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        inflow.note(gradient)
        return gradient, jnp.zeros(())

    identity.defvjp(forward, backward)
    return identity


_current: ContextVar[tuple[LookupGradients, ...]] = ContextVar(
    "distribax_lookup_gradients", default=()
)


def note_gradients(gradients: LookupGradients) -> AbstractContextManager[None]:
    """Notes the gradients of the rows that are looked up inside."""
    return set_within(_current, (*_current.get(), gradients))


def can_mark_rows(table: contracts.Table, variables: Iterable[contracts.Variable]) -> bool:
    """Tells whether rows of `table`, which consists of `variables`, can be marked as they are."""
    return not any(each.covers_part(table, variables) for each in _current.get())


def mark_rows(table: contracts.Table, rows: jax.Array, ids: ArrayLike) -> jax.Array:
    """Returns rows that were looked up, marked for all functions that are being differentiated."""
    for gradients in _current.get():
        if gradients.covers(table):
            rows = gradients.mark(table, rows, ids)
    return rows
