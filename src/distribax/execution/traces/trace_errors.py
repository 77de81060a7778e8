"""Errors of code that wants a value while it is traced: what to write instead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax

_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

_ID_HINT = (
    "replica_id_in_sync_group is such a value in a compiled step: all replicas are one program, so "
    "it has no number while the code is traced. "
)
_HINT = (
    "Write jnp.where(condition, a, b) for a choice between values, or "
    "jax.lax.cond(condition, f, g, x) for one between computations, instead of `if`. Outside "
    "dx.function the code runs once per replica, and `if` works."
)


@contextlib.contextmanager
def explain(uses_replica_id: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Adds to the errors of code that needs a value which is not known while it is traced.

    Args:
        uses_replica_id: Tells whether the code has asked for the index of its replica.

    Yields:
        Nothing.
    """
    try:
        yield
    except _ERRORS as error:
        text = str(error)
        if _HINT not in text:
            by_id = "the argument" not in text and uses_replica_id()
            error.args = (f"{text}\n{_ID_HINT if by_id else ''}{_HINT}",)
        raise
