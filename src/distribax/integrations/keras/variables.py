"""Keras variables that know their strategy.

A variable that is made in a strategy's scope, or that a step uses, keeps its value in a cell: in a
step it is placed by the strategy, outside it is a plain array, as Keras's own code expects.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from distribax import context, contracts, jax_private
from distribax.execution import frames
from distribax.integrations import replica_state
from distribax.integrations.foreign_variable import Cell, Rule
from distribax.types import VariableAggregation

_SLOT = "_value"
_STRATEGY = "_distribax_strategy"
_NEW = object()


def _own_part(value: Any, replica_id: int | jax.Array) -> jax.Array:
    """Returns a replica's part of a sum: the first one continues from what there is."""
    return jnp.where(replica_id == 0, value, jnp.zeros_like(value))


# What is not said, or "mean", is the mean of floating-point numbers, and else the first one's.
_MEAN = Rule(VariableAggregation.MEAN)
_RULES = {
    "sum": Rule(VariableAggregation.SUM, _own_part),
    "only_first_replica": Rule(VariableAggregation.ONLY_FIRST_REPLICA),
}
_SAME = Rule(VariableAggregation.NONE)


def get_strategy(variable: keras.Variable) -> contracts.Strategy | None:
    """Returns the strategy in whose scope a variable was made, or None."""
    found: contracts.Strategy | None = variable.__dict__.get(_STRATEGY)
    return found


def get_cell(variable: keras.Variable) -> Cell:
    """Returns where the value of a variable is kept, which it is in a cell from now on."""
    held = variable.__dict__[_SLOT]
    return held if isinstance(held, Cell) else _put_in_cell(variable, held)


def replace_cell(variable: keras.Variable, cell: Cell) -> None:
    """Has a variable keep its value in another cell from now on."""
    cell.owner = get_strategy(variable)
    variable.__dict__[_SLOT] = cell


def mark_same(variable: keras.Variable) -> None:
    """Says that all replicas write the same to a variable, by the way it is computed."""
    get_cell(variable).rule = _SAME


class Value:
    """Stands in for `keras.Variable._value`, which all reads and writes of a variable pass."""

    def __get__(self, variable: keras.Variable | None, owner: type | None = None) -> Any:
        if variable is None:
            return self
        held = variable.__dict__.get(_SLOT, _NEW)
        if not isinstance(held, Cell):
            if held is _NEW:
                raise AttributeError(f"{variable!r} has no value yet")
            if held is None or not _is_in_step():
                return held
            held = _put_in_cell(variable, held)
        return replica_state.read(held)

    def __set__(self, variable: keras.Variable, value: Any) -> None:
        held = variable.__dict__.get(_SLOT, _NEW)
        if held is _NEW:
            if context.has_strategy():
                variable.__dict__[_STRATEGY] = context.get_strategy()
            held = None
        if value is None:
            # Keras frees what it holds itself while a step has the value; a cell never has two.
            if not isinstance(held, Cell):
                variable.__dict__[_SLOT] = None
            return
        if held is None:
            _initialize(variable, value)
            return
        if not isinstance(held, Cell):
            if not _is_in_step():
                variable.__dict__[_SLOT] = value
                return
            held = _put_in_cell(variable, held)
        replica_state.write(held, frames.detach(value))


def _is_in_step() -> bool:
    return frames.current() is not None or replica_state.current() is not None


def _initialize(variable: keras.Variable, value: Any) -> None:
    frame = frames.current()
    if frame is not None and jax_private.is_tracer(value):
        # A layer that is built by its first call, in a step.
        value = frame.evaluate(value)
    variable.__dict__[_SLOT] = value
    if get_strategy(variable) is not None:
        _put_in_cell(variable, value)


def _put_in_cell(variable: keras.Variable, value: Any) -> Cell:
    rule = _RULES.get(variable.aggregation, _MEAN)
    cell = Cell(f"keras.Variable {variable.path!r}", rule, value)
    cell.owner = get_strategy(variable)
    variable.__dict__[_SLOT] = cell
    return cell


def get_plain_state(variable: keras.Variable) -> dict[str, Any]:
    """Returns the attributes of a variable for a pickle: its value, without the strategy."""
    state = dict(variable.__dict__)
    held = state.get(_SLOT)
    if isinstance(held, Cell):
        state[_SLOT] = held.read()
    state.pop(_STRATEGY, None)
    return state
