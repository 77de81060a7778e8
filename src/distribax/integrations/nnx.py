"""Flax NNX modules and optimizers inside replicas, as they are.

The variables of a module that a replica reads or writes are lifted like `dx.Variable`s: mirrored by
the strategy, inputs and outputs of compiled steps. `nnx.Optimizer.update` in a replica adds up the
replicas' gradients first. Outside of steps a module is a plain NNX module.

It is loaded by the first step of a program that has imported `flax.nnx`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MemberDescriptorType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import pytreelib, tracers, variablelib

from distribax import jax_private
from distribax.execution import frames
from distribax.integrations import replica_state
from distribax.integrations.foreign_variable import Arrays, Cell, Rule
from distribax.training.checkpoints.tracked import Put, register_tracker
from distribax.types import VariableAggregation
from distribax.values import make_opaque

_NUMBERS = (jax.Array, bool, int, float, complex, np.ndarray, np.generic)


def adapt(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` as replicas run it, with the variables of NNX modules in view."""
    return replica_state.with_state(fn)


# How replicas share variables.


def _own_key(key: jax.Array, replica_id: int | jax.Array) -> jax.Array:
    """Returns a random key that is different in each replica."""
    fold = lambda one: jax.random.fold_in(one, replica_id)  # noqa: E731
    return fold(key) if key.ndim == 0 else jax.vmap(fold)(key.ravel()).reshape(key.shape)


def _own_part(value: Arrays, replica_id: int | jax.Array) -> Any:
    """Returns a replica's part of a sum: the first one continues from what there is."""
    return jax.tree.map(lambda x: jnp.where(replica_id == 0, x, jnp.zeros_like(x)), value)


_FIRST = VariableAggregation.ONLY_FIRST_REPLICA
_RULES: tuple[tuple[type, Rule], ...] = (
    (nnx.RngKey, Rule(_FIRST, _own_key)),
    (nnx.RngCount, Rule(VariableAggregation.NONE)),
    (nnx.metrics.MetricState, Rule(VariableAggregation.SUM, _own_part)),
    (nnx.Variable, Rule(VariableAggregation.MEAN)),
)


def _rule(variable: nnx.Variable[Any]) -> Rule:
    return next(rule for kind, rule in _RULES if isinstance(variable, kind))


# Variables.


class _Made:
    """The value of a variable that was made inside a step, and is no state of its own yet."""

    __slots__ = ("value", "where")

    def __init__(self, value: object, where: object) -> None:
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
    """Stands in for the slot of `nnx.Variable` that holds the value.

    The slot holds the plain value, or the cell of a variable that a step has used.
    """

    def __init__(self, slot: MemberDescriptorType) -> None:
        self._slot = slot

    def __get__(self, variable: nnx.Variable[Any] | None, owner: type | None = None) -> Any:
        if variable is None:
            return self
        held = self._slot.__get__(variable)
        if type(held) is not Cell:
            where = _where()
            if type(held) is _Made and (where is None or held.where is where):
                return held.value
            cell = None if where is None else self._cell(variable, held)
            if cell is None:
                return held.value if type(held) is _Made else held
            held = cell
        return replica_state.read(held)

    def __set__(self, variable: nnx.Variable[Any], value: object) -> None:
        try:
            held = self._slot.__get__(variable)
        except AttributeError:
            where = _where()
            self._slot.__set__(variable, value if where is None else _Made(value, where))
            return
        if type(held) is not Cell:
            where = _where()
            if type(held) is _Made and (where is None or held.where is where):
                held.value = value
                return
            cell = None if where is None else self._cell(variable, held)
            if cell is None:
                self._slot.__set__(variable, value)
                return
            held = cell
        replica_state.write(held, value)

    def __delete__(self, variable: nnx.Variable[Any]) -> None:
        self._slot.__delete__(variable)

    def is_lifted(self, variable: nnx.Variable[Any]) -> bool:
        """Tells whether the variable is state that the step which runs now may change."""
        held = self._slot.__get__(variable)
        return type(held) is Cell or self._cell(variable, held) is not None

    def _cell(self, variable: nnx.Variable[Any], held: object) -> Cell | None:
        """Puts a value that was made elsewhere into a cell, unless it is not made of numbers."""
        value = held.value if type(held) is _Made else held
        leaves = jax.tree.leaves(value)
        if variable.ref:
            raise ValueError(
                f"nnx.{type(variable).__name__} holds a jax.Ref, whose writes replicas cannot keep "
                "apart. Create it with ref=False, which is the default."
            )
        if not leaves or not all(isinstance(leaf, _NUMBERS) for leaf in leaves):
            return None
        name = f"nnx.{type(variable).__name__} of shape {jnp.shape(leaves[0])}"
        if any(jax_private.is_tracer(leaf) for leaf in leaves):
            raise RuntimeError(
                f"{name} was made while another step was traced, and its value has ended with that "
                "trace. Create modules before the step, inside `with strategy.scope():`; and take "
                "what a module has sown out of it in the same step, with nnx.pop()."
            )
        cell = Cell(name, _rule(variable), value)
        self._slot.__set__(variable, cell)
        return cell


class _VariableTrace:
    """Stands in for the slot of `nnx.Variable` that says which trace may change it."""

    def __init__(self, slot: MemberDescriptorType) -> None:
        self._slot = slot

    def __get__(self, variable: nnx.Variable[Any] | None, owner: type | None = None) -> Any:
        if variable is None:
            return self
        held = self._slot.__get__(variable)
        if _at_step_level() and held == _OUTSIDE and _value.is_lifted(variable):
            return tracers.TraceState()
        return held

    def __set__(self, variable: nnx.Variable[Any], state: object) -> None:
        self._slot.__set__(variable, state)


def _at_step_level() -> bool:
    """Tells whether code of a compiled step runs, and no JAX transformation inside of it."""
    frame = frames.current()
    return frame is not None and jax_private.get_innermost_trace() is frame.trace


class _ModuleTrace:
    """Stands in for the slot of a module's bookkeeping that says which trace may change it.

    NNX puts modules together anew when it differentiates them, so that a module of outside gets
    its bookkeeping from inside a step; for modules a step is the same as outside.
    """

    def __init__(self, slot: MemberDescriptorType) -> None:
        self._slot = slot

    def __get__(self, state: pytreelib.PytreeState | None, owner: type | None = None) -> Any:
        if state is None:
            return self
        held = self._slot.__get__(state)
        return tracers.TraceState() if held == _OUTSIDE and _at_step_level() else held

    def __set__(self, state: pytreelib.PytreeState, trace: object) -> None:
        self._slot.__set__(state, _OUTSIDE if _at_step_level() else trace)


class _Refused:
    """Stands in for the slot of a hijax variable that holds the value."""

    def __init__(self, slot: MemberDescriptorType) -> None:
        self._slot = slot

    def __get__(self, variable: nnx.Variable[Any] | None, owner: type | None = None) -> Any:
        if variable is None:
            return self
        if _where() is not None:
            raise ValueError(
                f"nnx.{variable._var_type.__name__} is a hijax variable, which replicas cannot "
                "share yet. Create it with hijax=False, which is the default."
            )
        return self._slot.__get__(variable)

    def __set__(self, variable: nnx.Variable[Any], value: object) -> None:
        self._slot.__set__(variable, value)


# Steps that the replicas take together.


def _update_together(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def call(optimizer: nnx.Optimizer[Any], model: object, *grads: object, **kwargs: object) -> Any:
        state = replica_state.current()
        if state is None:
            return update(optimizer, model, *grads, **kwargs)
        with state.together():
            return update(optimizer, model, *state.add_up(grads), **state.add_up(kwargs))

    return call


def _measure_together(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def call(metric: nnx.metrics.Welford, **kwargs: object) -> None:
        state = replica_state.current()
        values = kwargs.get(metric.argname)
        if state is None or values is None:
            return update(metric, **kwargs)
        with state.together():
            return update(metric, **{metric.argname: state.gather(jnp.asarray(values))})

    return call


# Checkpoints.


def _track_variable(variable: nnx.Variable[Any]) -> Iterator[tuple[str, Any, Put]]:
    """Yields the value of a variable, for a checkpoint."""

    def put(new: object) -> None:
        variable.set_value(new)

    yield "", variable.get_value(), put


def _track_module(module: nnx.Pytree) -> Iterator[tuple[str, Any, Put]]:
    """Yields the variables of a module or an optimizer, each once, for a checkpoint."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            yield ".".join(map(str, path)), node, _refuse_replacement


def _refuse_replacement(new: object) -> None:
    raise AssertionError("variables are changed, not replaced")


_OUTSIDE = tracers.TraceState()
_OUTSIDE._jax_trace = jax_private.get_outside_trace_state()

_value = _Value(nnx.Variable.__dict__["_raw_value"])
nnx.Variable._raw_value = _value
nnx.Variable._trace_state = _VariableTrace(nnx.Variable.__dict__["_trace_state"])
variablelib.HijaxVariable._leaves = _Refused(variablelib.HijaxVariable.__dict__["_leaves"])
pytreelib.PytreeState._trace_state = _ModuleTrace(pytreelib.PytreeState.__dict__["_trace_state"])
nnx.Optimizer.update = _update_together(nnx.Optimizer.update)
nnx.metrics.Welford.update = _measure_together(nnx.metrics.Welford.update)
make_opaque(nnx.Pytree)
register_tracker(nnx.Variable, _track_variable)
register_tracker(nnx.Pytree, _track_module)
