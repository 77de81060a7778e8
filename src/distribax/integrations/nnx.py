"""Flax NNX modules and optimizers inside replicas, as they are.

The variables of a module that a replica reads or writes are lifted like `dx.Variable`s: mirrored by
the strategy, inputs and outputs of compiled steps. `nnx.Optimizer.update` in a replica adds up the
replicas' gradients first. Outside of steps a module is a plain NNX module.

It is loaded by the first step of a program that has imported `flax.nnx`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distribax import jax_compat
from distribax.execution import frames
from distribax.integrations import replica_state
from distribax.integrations.cells import Cell, Rule
from distribax.types import StepFn, VariableAggregation
from distribax.values import make_opaque

_NUMBERS = (bool, int, float, complex, np.ndarray, np.generic)
_MISSING = object()


def adapt(fn: StepFn) -> StepFn:
    """Returns `fn` as replicas run it, with the variables of NNX modules in view."""
    return replica_state.with_state(fn)


# How replicas share variables.


def _own_key(key: Any, replica_id: Any) -> Any:
    """Returns a random key that is different in each replica."""
    fold = lambda one: jax.random.fold_in(one, replica_id)  # noqa: E731
    return fold(key) if key.ndim == 0 else jax.vmap(fold)(key.ravel()).reshape(key.shape)


def _own_part(value: Any, replica_id: Any) -> Any:
    """Returns a replica's part of a sum: the first one continues from what there is."""
    return jax.tree.map(lambda x: jnp.where(replica_id == 0, x, jnp.zeros_like(x)), value)


_FIRST = VariableAggregation.ONLY_FIRST_REPLICA
_RULES: tuple[tuple[type, Rule], ...] = (
    (nnx.RngKey, Rule(_FIRST, _own_key)),
    (nnx.RngState, Rule(_FIRST)),
    (nnx.metrics.MetricState, Rule(VariableAggregation.SUM, _own_part)),
    (nnx.Variable, Rule(VariableAggregation.MEAN)),
)


def _rule(variable: nnx.Variable[Any]) -> Rule:
    return next(rule for kind, rule in _RULES if isinstance(variable, kind))


# Variables.


class _Made:
    """The value of a variable that was made inside a step, and is no state of its own yet."""

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: object) -> None:
        self.value = value
        self.where = where


def _where() -> object | None:
    """Returns the trace, or the eager replica, that the code runs in; None outside of steps."""
    frame = frames.current()
    if frame is not None:
        return frame.function
    state = replica_state.current()
    return None if state is None else state.entry


class _Value:
    """Stands in for the slot of `nnx.Variable` that holds the value."""

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, variable: Any, owner: type | None = None) -> Any:
        if variable is None:
            return self
        held = self._slot.__get__(variable)
        if type(held) is not Cell:
            where = _where()
            if type(held) is _Made and (where is None or held.where is where):
                return held.value
            if where is None:
                return held
            cell = self.cell(variable, held)
            if cell is None:
                return held
            held = cell
        return _read(held)

    def __set__(self, variable: Any, value: Any) -> None:
        try:
            held = self._slot.__get__(variable)
        except AttributeError:
            held = _MISSING
        if type(held) is not Cell:
            where = _where()
            if type(held) is _Made and (where is None or held.where is where):
                held.value = value
                return
            cell = None
            if where is not None:
                if held is _MISSING:
                    value = _Made(value, where)
                else:
                    cell = self.cell(variable, held)
            if cell is None:
                self._slot.__set__(variable, value)
                return
            held = cell
        _write(held, value)

    def __delete__(self, variable: Any) -> None:
        self._slot.__delete__(variable)

    def is_state(self, variable: Any) -> bool:
        """Tells whether the variable was there before the step that runs now."""
        held = self._slot.__get__(variable)
        if type(held) is _Made and held.where is _where():
            return False
        return type(held) is Cell or self.cell(variable, held) is not None

    def cell(self, variable: Any, held: Any) -> Cell | None:
        """Puts the value into a cell, if it can be lifted: if it is an array or a nest of them."""
        value = held.value if type(held) is _Made else held
        name = f"nnx.{type(variable).__name__}"
        leaves = jax.tree.leaves(value)
        if variable.ref:
            raise ValueError(...)
        if type(held) is _Made and any(map(jax_compat.is_tracer, leaves)):
            raise RuntimeError(...)
        if not leaves or not all(_is_number(leaf) for leaf in leaves):
            return None
        cell = Cell(name, _rule(variable), value)
        self._slot.__set__(variable, cell)
        return cell
