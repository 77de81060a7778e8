"""Flax NNX modules and optimizers inside replicas, unchanged.

The variables of a module that a replica reads or writes are lifted like `dx.Variable`s: mirrored by
the strategy, inputs and outputs of compiled steps. `nnx.Optimizer.update` in a replica adds up the
replicas' gradients first. Outside of steps a module is a plain NNX module.

It is loaded by the first step of a program that has imported `flax.nnx`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import MemberDescriptorType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx import pytreelib, tracers, variablelib
from typing_extensions import override

from distribax import jax_private
from distribax.execution import adapters, frames
from distribax.integrations import replica_state
from distribax.integrations.foreign_variable import SUM, ForeignVariable, Rule, refuse_replacement
from distribax.integrations.replacement import Function, replacement
from distribax.training.checkpoints.tracked import Put, register_tracker
from distribax.types import VariableAggregation
from distribax.values import make_opaque

_NUMBERS = (jax.Array, bool, int, float, complex, np.ndarray, np.generic)


# Replicas keep their writes to variables of NNX modules apart until they end.
adapt = replica_state.with_state

# How replicas share variables.


def _fold_key(key: jax.Array, replica_id: int | jax.Array) -> jax.Array:
    """Returns a random key that is different in each replica."""
    fold = lambda one: jax.random.fold_in(one, replica_id)  # noqa: E731
    return fold(key) if key.ndim == 0 else jax.vmap(fold)(key.ravel()).reshape(key.shape)


_FIRST = VariableAggregation.ONLY_FIRST_REPLICA
_RULES: tuple[tuple[type, Rule], ...] = (
    (nnx.RngKey, Rule(_FIRST, _fold_key)),
    (nnx.RngCount, Rule(VariableAggregation.NONE)),
    (nnx.metrics.MetricState, SUM),
    (nnx.Variable, Rule(VariableAggregation.MEAN)),
)


# Variables.


@dataclass(slots=True)
class _Made:
    """The value of a variable that was made inside a step, and is not part of its state yet."""

    value: object
    where: object


def _find_place() -> object | None:
    """Returns the trace, or the eager replica, that the code runs in; None outside of steps."""
    frame = frames.current()
    if frame is not None:
        return frame.function
    state = replica_state.current()
    return None if state is None else state.entry


class _ReplacedSlot:
    """Stands in for a slot of a class of NNX; it does what the slot does."""

    def __init__(self, slot: MemberDescriptorType) -> None:
        self._slot = slot

    def __get__(self, thing: Any, owner: type | None = None) -> Any:
        return self if thing is None else self._read(thing)

    def __set__(self, thing: Any, value: object) -> None:
        self._slot.__set__(thing, value)

    def __delete__(self, thing: Any) -> None:
        self._slot.__delete__(thing)

    def _read(self, thing: Any) -> Any:
        return self._slot.__get__(thing)


class _VariableValue(_ReplacedSlot):
    """Stands in for the slot of `nnx.Variable` that holds the value.

    The slot holds the plain value, or the foreign variable that a step has made of it.
    """

    @override
    def _read(self, variable: nnx.Variable[Any]) -> Any:
        held = self._slot.__get__(variable)
        foreign = self._find_foreign(variable, held)
        if foreign is not None:
            return replica_state.read(foreign)
        return held.value if type(held) is _Made else held

    @override
    def __set__(self, variable: nnx.Variable[Any], value: object) -> None:
        try:
            held = self._slot.__get__(variable)
        except AttributeError:
            where = _find_place()
            self._slot.__set__(variable, value if where is None else _Made(value, where))
            return
        foreign = self._find_foreign(variable, held)
        if foreign is not None:
            replica_state.write(foreign, value)
        elif type(held) is _Made:
            held.value = value
        else:
            self._slot.__set__(variable, value)

    def is_lifted(self, variable: nnx.Variable[Any]) -> bool:
        """Tells whether the variable is state that the step which runs now may change."""
        held = self._slot.__get__(variable)
        return type(held) is ForeignVariable or self._adopt(variable, held) is not None

    def _find_foreign(self, variable: nnx.Variable[Any], held: object) -> ForeignVariable | None:
        """Returns the foreign variable; None for one that is not state of the running step."""
        if type(held) is ForeignVariable:
            return held
        where = _find_place()
        if where is None or (type(held) is _Made and held.where is where):
            return None
        return self._adopt(variable, held)

    def _adopt(self, variable: nnx.Variable[Any], held: object) -> ForeignVariable | None:
        """Makes a variable from elsewhere a foreign one, if its value is made of numbers."""
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
        rule = next(rule for kind, rule in _RULES if isinstance(variable, kind))
        foreign = ForeignVariable(name, rule, value)
        self._slot.__set__(variable, foreign)
        return foreign


class _VariableTrace(_ReplacedSlot):
    """Stands in for the slot of `nnx.Variable` that says which trace may change it."""

    @override
    def _read(self, variable: nnx.Variable[Any]) -> Any:
        held = self._slot.__get__(variable)
        if _is_at_step_level() and held == _OUTSIDE and _value.is_lifted(variable):
            return tracers.TraceState()
        return held


def _is_at_step_level() -> bool:
    """Tells whether code of a compiled step runs, and no JAX transformation inside of it."""
    frame = frames.current()
    return frame is not None and jax_private.get_innermost_trace() is frame.trace


class _ModuleTrace(_ReplacedSlot):
    """Stands in for the slot of a module's bookkeeping that says which trace may change it.

    NNX rebuilds modules when it differentiates them, so a module from outside may get its
    bookkeeping inside a step; for modules, a step counts as outside.
    """

    @override
    def _read(self, state: pytreelib.PytreeState) -> Any:
        held = self._slot.__get__(state)
        return tracers.TraceState() if held == _OUTSIDE and _is_at_step_level() else held

    @override
    def __set__(self, state: pytreelib.PytreeState, trace: object) -> None:
        self._slot.__set__(state, _OUTSIDE if _is_at_step_level() else trace)


class _HijaxValue(_ReplacedSlot):
    """Stands in for the slot of a hijax variable that holds the value."""

    @override
    def _read(self, variable: nnx.Variable[Any]) -> Any:
        if _find_place() is not None:
            raise ValueError(
                f"nnx.{variable._var_type.__name__} is a hijax variable, which replicas cannot "
                "share yet. Create it with hijax=False, which is the default."
            )
        return self._slot.__get__(variable)


# Steps that the replicas take together.


@replacement
def _update_together(
    update: Function,
    /,
    optimizer: nnx.Optimizer[Any],
    model: object,
    *grads: object,
    **kwargs: object,
) -> Any:
    state = replica_state.current()
    if state is None:
        return update(optimizer, model, *grads, **kwargs)
    with state.together():
        return update(optimizer, model, *state.add_up(grads), **state.add_up(kwargs))


@replacement
def _measure_together(update: Function, /, metric: nnx.metrics.Welford, **kwargs: object) -> None:
    state = replica_state.current()
    values = kwargs.get(metric.argname)
    if state is None or values is None:
        update(metric, **kwargs)
        return
    with state.together():
        update(metric, **{metric.argname: state.gather(jnp.asarray(values))})


# Attributes of modules that are no state: a step is traced again when they have changed.


class _Attributes:
    """The attributes of the modules that a trace has read, as they were before it."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[nnx.Pytree], dict[str, object]]] = {}

    def note(self, module: nnx.Pytree) -> None:
        """Notes the attributes of a module that is read for the first time."""
        if id(module) not in self._seen:
            self._seen[id(module)] = weakref.ref(module), _get_attributes(module)

    def holds(self) -> bool:
        """Tells whether the modules that still exist are as they were."""
        alive = [
            (module, then) for known, then in self._seen.values() if (module := known()) is not None
        ]
        self._seen = {id(module): (weakref.ref(module), then) for module, then in alive}
        return all(_are_same(_get_attributes(module), then) for module, then in alive)


def _get_attributes(module: nnx.Pytree) -> dict[str, object]:
    held = object.__getattribute__(module, "__dict__")
    return {name: value for name, value in held.items() if not name.startswith("_pytree__")}


def _are_same(now: dict[str, object], then: dict[str, object]) -> bool:
    return now.keys() == then.keys() and all(
        value is (old := then[name])
        or (isinstance(value, _PLAIN) and type(value) is type(old) and value == old)
        for name, value in now.items()
    )


_PLAIN = (bool, int, float, complex, str, bytes, tuple)
_watching: ContextVar[_Attributes | None] = ContextVar("distribax_nnx_attributes", default=None)
_num_watching = 0
_watch_lock = threading.Lock()


def _read_attribute(module: nnx.Pytree, name: str) -> Any:
    attributes = _watching.get()
    if attributes is not None:
        attributes.note(module)
    return object.__getattribute__(module, name)


@contextlib.contextmanager
def _watch() -> Iterator[_Attributes]:
    """Notes the attributes of modules that the code inside reads."""
    global _num_watching
    attributes = _Attributes()
    with _watch_lock:
        # Only meanwhile, as it makes each access slower.
        _num_watching += 1
        nnx.Pytree.__getattribute__ = _read_attribute
    token = _watching.set(attributes)
    try:
        yield attributes
    finally:
        _watching.reset(token)
        with _watch_lock:
            _num_watching -= 1
            if not _num_watching:
                del nnx.Pytree.__getattribute__


@replacement
def _note_changes(change: Function, module: nnx.Pytree, *args: object) -> None:
    change(module, *args)
    adapters.note_change()


# Checkpoints.


def _track_variable(variable: nnx.Variable[Any]) -> Iterator[tuple[str, Any, Put]]:
    """Yields the value of a variable, for a checkpoint."""
    yield "", variable.get_value(), variable.set_value


def _track_module(module: nnx.Pytree) -> Iterator[tuple[str, Any, Put]]:
    """Yields the variables of a module or an optimizer, each once, for a checkpoint."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable):
            yield ".".join(map(str, path)), node, refuse_replacement


_OUTSIDE = tracers.TraceState()
_OUTSIDE._jax_trace = jax_private.get_outside_trace_state()

_value = _VariableValue(nnx.Variable.__dict__["_raw_value"])
nnx.Variable._raw_value = _value
nnx.Variable._trace_state = _VariableTrace(nnx.Variable.__dict__["_trace_state"])
variablelib.HijaxVariable._leaves = _HijaxValue(variablelib.HijaxVariable.__dict__["_leaves"])
pytreelib.PytreeState._trace_state = _ModuleTrace(pytreelib.PytreeState.__dict__["_trace_state"])
nnx.Optimizer.update = _update_together(nnx.Optimizer.update)
nnx.metrics.Welford.update = _measure_together(nnx.metrics.Welford.update)
nnx.Pytree._setattr = _note_changes(nnx.Pytree._setattr)
nnx.Pytree.__delattr__ = _note_changes(nnx.Pytree.__delattr__)
adapters.add_watch(_watch)
adapters.add_commit(replica_state.commit)
make_opaque(nnx.Pytree)
register_tracker(nnx.Variable, _track_variable)
register_tracker(nnx.Pytree, _track_module)
