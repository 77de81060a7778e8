"""Keras variables that know their strategy.

A variable that is made in a strategy's scope, or that a step uses, keeps its value in a cell: in a
step it is placed by the strategy, outside it is a plain array, as Keras's own code expects. A
variable that a `dx.Optimizer` updates keeps it in a `dx.Variable`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from distribax import context, contracts, jax_private
from distribax.context import keeping
from distribax.execution import adapters, frames, overlay
from distribax.integrations import replica_state
from distribax.integrations.foreign_variable import SUM, Cell, Rule
from distribax.types import VariableAggregation
from distribax.values import Mirrored, PerReplica
from distribax.variables import Variable, late_values

_SLOT = "_value"
_STRATEGY = "_distribax_strategy"
_KERAS_VARIABLE = "_keras_variable"
_NEW = object()


# By default, and for "mean": the mean of floating-point numbers; of others, the first replica's.
_MEAN = Rule(VariableAggregation.MEAN)
_RULES = {"sum": SUM, "only_first_replica": Rule(VariableAggregation.ONLY_FIRST_REPLICA)}
_SAME = Rule(VariableAggregation.NONE)


class VariableCell(Cell):
    """Where the value of a Keras variable is kept."""

    per_replica = False
    program_sharding = None
    source = None
    # Whether somebody may have a value for it, who has not found it yet.
    awaited = False

    @property
    def described(self) -> str:
        """The variable as error messages name it."""
        return self.name

    @property
    def dtype(self) -> np.dtype[Any]:
        """The data type of the value."""
        return np.dtype(self.types().dtype)

    def read_value(self) -> Any:
        """Returns the value as the code that runs now sees it."""
        if self.awaited:
            late_values.ask_givers()
        stand_in = overlay.find_stand_in(self)  # type: ignore[arg-type]
        return replica_state.read(self) if stand_in is None else stand_in

    def write_value(self, value: Any) -> None:
        """Replaces the value, by the rules of where the code runs."""
        if self.awaited:
            late_values.ask_givers()
        values = overlay.find_overlay(self)  # type: ignore[arg-type]
        if values is not None:
            # The function that is being differentiated goes on with it.
            values[self] = value  # type: ignore[index]
        replica_state.write(self, frames.detach(value))


def get_strategy(variable: keras.Variable) -> contracts.Strategy | None:
    """Returns the strategy in whose scope a variable was made, or None."""
    found: contracts.Strategy | None = variable.__dict__.get(_STRATEGY)
    return found


def stop_waiting(variable: keras.Variable) -> None:
    """Remembers that whoever waits for new variables has seen this one."""
    held = variable.__dict__.get(_SLOT)
    if isinstance(held, VariableCell):
        held.awaited = False
    elif isinstance(held, Variable):
        held.stop_waiting()


def restore_value(variable: keras.Variable, value: np.ndarray) -> None:
    """Gives a variable a value that was saved, whatever Keras is doing at the time."""
    held = variable.__dict__.get(_SLOT)
    if isinstance(held, VariableCell):
        held.write_value(jnp.asarray(value))
    else:
        variable.assign(value)


def get_cell(variable: keras.Variable) -> VariableCell | Variable:
    """Returns what keeps the value of a variable, which is a cell from now on."""
    held = variable.__dict__[_SLOT]
    return held if isinstance(held, _KEEPERS) else _put_in_cell(variable, held)


def replace_cell(variable: keras.Variable, cell: VariableCell) -> None:
    """Has a variable keep its value in another cell from now on."""
    cell.owner = get_strategy(variable)
    variable.__dict__[_SLOT] = cell


def mark_same(variable: keras.Variable) -> None:
    """Says that all replicas write the same to a variable, by the way it is computed."""
    cell = get_cell(variable)
    if isinstance(cell, VariableCell):
        cell.rule = _SAME


class Value:
    """Stands in for `keras.Variable._value`, which all reads and writes of a variable pass."""

    def __get__(self, variable: keras.Variable | None, owner: type | None = None) -> Any:
        if variable is None:
            return self
        held = variable.__dict__.get(_SLOT, _NEW)
        if isinstance(held, VariableCell):
            return held.read_value()
        if held is _NEW:
            raise AttributeError("the variable has no value yet")
        if isinstance(held, Variable):
            return _read_variable(held)
        if held is None or not _is_in_step():
            return held
        return _put_in_cell(variable, held).read_value()

    def __set__(self, variable: keras.Variable, value: Any) -> None:
        held = variable.__dict__.get(_SLOT, _NEW)
        if held is _NEW:
            if context.has_strategy():
                variable.__dict__[_STRATEGY] = context.get_strategy()
            held = None
        if value is None:
            # Keras frees what it holds itself while a step has the value; a cell never has two.
            if not isinstance(held, _KEEPERS):
                variable.__dict__[_SLOT] = None
            return
        if isinstance(held, VariableCell):
            held.write_value(value)
        elif isinstance(held, Variable):
            _write_variable(held, value)
        elif held is None:
            _initialize(variable, value)
        elif _is_in_step():
            _put_in_cell(variable, held).write_value(value)
        else:
            variable.__dict__[_SLOT] = value


_KEEPERS = (VariableCell, Variable)


def _is_in_step() -> bool:
    return frames.current() is not None or replica_state.current() is not None


def _initialize(variable: keras.Variable, value: Any) -> None:
    frame = frames.current()
    if frame is not None and jax_private.is_tracer(value):
        # A layer that is built by its first call, in a step.
        value = frame.evaluate(value)
    variable.__dict__[_SLOT] = value
    awaited = late_values.is_somebody_waiting()
    if awaited or get_strategy(variable) is not None:
        _put_in_cell(variable, value).awaited = awaited


def _put_in_cell(variable: keras.Variable, value: Any) -> VariableCell:
    rule = _RULES.get(variable.aggregation, _MEAN)
    cell = VariableCell(f"keras.Variable {variable.path!r}", rule, value)
    cell.owner = get_strategy(variable)
    variable.__dict__[_SLOT] = cell
    return cell


def get_plain_state(variable: keras.Variable) -> dict[str, Any]:
    """Returns the attributes of a variable for a pickle: its value, without the strategy."""
    state = dict(variable.__dict__)
    if isinstance(state.get(_SLOT), _KEEPERS):
        state[_SLOT] = variable._value
    state.pop(_STRATEGY, None)
    return state


# Variables that keep their value in a `dx.Variable`.


class _Promotions:
    """How many variables had been promoted when a step was traced."""

    num_promoted = 0

    def __init__(self) -> None:
        self._count = _Promotions.num_promoted

    def holds(self) -> bool:
        """Tells whether no more have been since: a trace may have used their cells."""
        return self._count == _Promotions.num_promoted


@contextlib.contextmanager
def watch_promotions() -> Iterator[_Promotions]:
    """Notes which variables the code inside can find in cells."""
    yield _Promotions()


def promote(variable: keras.Variable) -> Variable:
    """Lets a variable keep its value in a `dx.Variable`, and returns that."""
    held = variable.__dict__[_SLOT]
    if isinstance(held, Variable):
        return held
    value = held.read() if isinstance(held, VariableCell) else held
    strategy = get_strategy(variable) or context.get_strategy()
    here = context.get_strategy() is strategy
    frame = frames.current()
    scope = contextlib.nullcontext() if here else strategy.scope()
    # It is a part of the Keras variable: no code that is run again has to find it.
    with frames.enter(None), scope, keeping.keep_in(None):
        made = jax_private.run_outside_trace(lambda: _make_variable(variable, value))
    variable.__dict__[_SLOT] = made
    _Promotions.num_promoted += 1
    adapters.note_change()
    if frame is not None:
        # What has been traced of the step up to here has used the cell.
        frame.function.has_created = True
    return made


def _make_variable(variable: keras.Variable, value: Any) -> Variable:
    is_float = jnp.issubdtype(value.dtype, jnp.inexact)
    named = variable.aggregation if variable.aggregation in ("sum", "mean") else None
    return Variable(
        value,
        trainable=variable.trainable,
        name=variable.path,
        aggregation=named or ("mean" if is_float else "only_first_replica"),
        constraint=variable.constraint,
    )


def as_keras(variable: Any) -> Any:
    """Returns the Keras variable that keeps its value in a `dx.Variable`; others as they are."""
    if not isinstance(variable, Variable):
        return variable
    known = variable.__dict__.get(_KERAS_VARIABLE)
    if known is None:
        known = jax_private.run_outside_trace(lambda: _make_keras_variable(variable))
        variable.__dict__[_KERAS_VARIABLE] = known
    return known


def _make_keras_variable(variable: Variable) -> keras.Variable:
    name = variable.name.removesuffix(":0").replace("/", "_")
    made = keras.Variable(
        "zeros", variable.shape, str(variable.dtype), trainable=variable.trainable, name=name
    )
    made.constraint = variable.constraint
    made.__dict__[_SLOT] = variable
    made.__dict__[_STRATEGY] = variable.distribute_strategy
    return made


def _write_variable(variable: Variable, value: Any) -> None:
    state = replica_state.current()
    if state is None or not state.is_together:
        variable.assign(value)
        return
    # The replicas have computed the same: every copy is given its own.
    state.replica.merge_call(_update_copies, args=(variable, value))


def _update_copies(strategy: contracts.Strategy, variable: Variable, value: Any) -> None:
    same = Mirrored.of(value.layout) if isinstance(value, PerReplica) else value
    strategy.extended.update(variable, lambda copy, new: copy.assign(new), args=(same,))


def _read_variable(variable: Variable) -> Any:
    if _is_in_step() or context.get_replica_context() is not None:
        return variable.read_value()
    return jnp.asarray(variable.host_value())
