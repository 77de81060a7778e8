"""Keras variables that know their strategy.

A variable that is made in a strategy's scope, or that a step uses, becomes a foreign variable: in a
step the strategy places its value, outside it is a plain array, as Keras's own code expects. A
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
from distribax.context import reuse
from distribax.execution import adapters, frames, overlay
from distribax.integrations import replica_state
from distribax.integrations.foreign_variable import SUM, ForeignVariable, Rule
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


class KerasVariable(ForeignVariable):
    """A Keras variable as a foreign one."""

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
        return np.dtype(self.get_types().dtype)

    def read_value(self) -> Any:
        """Returns the value as the code that runs now sees it."""
        if self.awaited:
            late_values.ask_givers()
        stand_in = overlay.find_stand_in(self)
        return replica_state.read(self) if stand_in is None else stand_in

    def write_value(self, value: Any) -> None:
        """Replaces the value, by the rules of where the code runs."""
        if self.awaited:
            late_values.ask_givers()
        values = overlay.find_overlay(self)
        if values is not None:
            # The function that is being differentiated goes on with it.
            values[self] = value
        replica_state.write(self, frames.detach(value))


def get_strategy(variable: keras.Variable) -> contracts.Strategy | None:
    """Returns the strategy in whose scope a variable was made, or None."""
    found: contracts.Strategy | None = variable.__dict__.get(_STRATEGY)
    return found


def stop_waiting(variable: keras.Variable) -> None:
    """Remembers that whoever waits for new variables has seen this one."""
    held = variable.__dict__.get(_SLOT)
    if isinstance(held, KerasVariable):
        held.awaited = False
    elif isinstance(held, Variable):
        held.stop_waiting()


def restore_value(variable: keras.Variable, value: np.ndarray) -> None:
    """Gives a variable a value that was saved, whatever Keras is doing at the time."""
    held = variable.__dict__.get(_SLOT)
    if isinstance(held, KerasVariable):
        held.write_value(jnp.asarray(value))
    else:
        variable.assign(value)


def adopt(variable: keras.Variable) -> KerasVariable | Variable:
    """Makes a variable a foreign one, if it is none, and returns what holds its value."""
    held = variable.__dict__[_SLOT]
    return held if isinstance(held, _HOLDERS) else _adopt_value(variable, held)


def replace_foreign(variable: keras.Variable, foreign: KerasVariable) -> None:
    """Lets another foreign variable hold the value of a variable from now on."""
    foreign.owner = get_strategy(variable)
    variable.__dict__[_SLOT] = foreign


def mark_same(variable: keras.Variable) -> None:
    """Notes that all replicas compute the same value for a variable."""
    foreign = adopt(variable)
    if isinstance(foreign, KerasVariable):
        foreign.rule = _SAME


class ValueDescriptor:
    """Stands in for `keras.Variable._value`, which all reads and writes of a variable pass."""

    def __get__(self, variable: keras.Variable | None, owner: type | None = None) -> Any:
        if variable is None:
            return self
        held = variable.__dict__.get(_SLOT, _NEW)
        if isinstance(held, KerasVariable):
            return held.read_value()
        if held is _NEW:
            raise AttributeError("the variable has no value yet")
        if isinstance(held, Variable):
            return _read_variable(held)
        if held is None or not _is_in_step():
            return held
        return _adopt_value(variable, held).read_value()

    def __set__(self, variable: keras.Variable, value: Any) -> None:
        held = variable.__dict__.get(_SLOT, _NEW)
        if held is _NEW:
            if context.has_strategy():
                variable.__dict__[_STRATEGY] = context.get_strategy()
            held = None
        if value is None:
            # Keras frees what it holds itself while a step has the value; there are never two here.
            if not isinstance(held, _HOLDERS):
                variable.__dict__[_SLOT] = None
            return
        if isinstance(held, KerasVariable):
            held.write_value(value)
        elif isinstance(held, Variable):
            _write_variable(held, value)
        elif held is None:
            _initialize(variable, value)
        elif _is_in_step():
            _adopt_value(variable, held).write_value(value)
        else:
            variable.__dict__[_SLOT] = value


_HOLDERS = (KerasVariable, Variable)


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
        _adopt_value(variable, value).awaited = awaited


def _adopt_value(variable: keras.Variable, value: Any) -> KerasVariable:
    rule = _RULES.get(variable.aggregation, _MEAN)
    foreign = KerasVariable(f"keras.Variable {variable.path!r}", rule, value)
    foreign.owner = get_strategy(variable)
    variable.__dict__[_SLOT] = foreign
    return foreign


def get_plain_state(variable: keras.Variable) -> dict[str, Any]:
    """Returns the attributes of a variable for a pickle: its value, without the strategy."""
    state = dict(variable.__dict__)
    if isinstance(state.get(_SLOT), _HOLDERS):
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
        """Tells whether none has been since then: the trace may have used its old value."""
        return self._count == _Promotions.num_promoted


@contextlib.contextmanager
def watch_promotions() -> Iterator[_Promotions]:
    """Notes how many variables are promoted when the code inside begins."""
    yield _Promotions()


def promote(variable: keras.Variable) -> Variable:
    """Lets a variable keep its value in a `dx.Variable`, and returns that."""
    held = variable.__dict__[_SLOT]
    if isinstance(held, Variable):
        return held
    value = held.read() if isinstance(held, KerasVariable) else held
    strategy = get_strategy(variable) or context.get_strategy()
    here = context.get_strategy() is strategy
    frame = frames.current()
    scope = contextlib.nullcontext() if here else strategy.scope()
    # It is a part of the Keras variable: no code that is run again has to find it.
    with frames.enter(None), scope, reuse.reuse_from(None):
        made = jax_private.run_outside_trace(lambda: _make_variable(variable, value))
    variable.__dict__[_SLOT] = made
    _Promotions.num_promoted += 1
    adapters.note_change()
    if frame is not None:
        # The part of the step that has been traced has used the old value.
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
