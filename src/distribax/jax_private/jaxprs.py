"""Names of JAX that are not stable, of those that take traces apart: see `jax_private`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax.extend import core

from distribax.jax_private import is_tracer, trace_of

# Stands for rows that are not known when a program is traced; it is replaced before it is compiled.
_rows: Any = core.Primitive("distribax_rows")


def _form(ids: Any, *, table: Any) -> Any:
    return _core.ShapedArray((*ids.shape, *table.shape[1:]), np.dtype(table.dtype))


_rows.def_abstract_eval(_form)


def in_trace(trace: Any, fn: Callable[[], Any]) -> Any:
    """Runs `fn` as a part of `trace`, although a transformation inside of it may be tracing."""
    with core.set_current_trace(trace):
        return fn()


def at_trace(value: Any, trace: Any) -> Any | None:
    """Returns what `value` is in `trace`, without its gradient; None if it does not exist there.

    A constant exists everywhere. What `jax.vmap`, a loop or another program has made of a value
    does not exist outside of it.
    """
    while is_tracer(value) and trace_of(value) is not trace:
        value = getattr(value, "primal", None)
        if value is None:
            return None
    return value


def unknown_rows(table: Any, ids: Any, trace: Any) -> Any:
    """Returns an array of the program that `trace` makes, which stands for rows of a table."""
    return in_trace(trace, lambda: _rows.bind(ids, table=table))


class Cut:
    """A traced program, cut at the rows that are unknown to it.

    Attributes:
        tables: The tables that rows are asked of, in the order of asking.
        stages: Their places, by when they can be asked for: those of a later stage have to do with
            rows of the earlier ones.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        self._closed, form = jax.make_jaxpr(fn, return_shape=True)(*args)
        self.out_tree = jax.tree.structure(form)
        equations = self._closed.jaxpr.eqns
        self._asked = [equation for equation in equations if equation.primitive is _rows]
        self._others = [equation for equation in equations if equation.primitive is not _rows]
        self.tables = [equation.params["table"] for equation in self._asked]
        self.stages = self._ordered()

    def _ordered(self) -> list[list[int]]:
        stages: list[list[int]] = []
        level: dict[Any, int] = {}
        place = 0
        for equation in self._closed.jaxpr.eqns:
            known = [var for var in equation.invars if not isinstance(var, core.Literal)]
            stage = max((level.get(var, 0) for var in known), default=0)
            if equation.primitive is _rows:
                stages.extend([] for _ in range(stage + 1 - len(stages)))
                stages[stage].append(place)
                place, stage = place + 1, stage + 1
            level.update(dict.fromkeys(equation.outvars, stage))
        return stages

    def given_ids(self, place: int) -> int | np.ndarray | None:
        """Returns which input the ids are, or the ids if they are constant, or None."""
        ids = self._asked[place].invars[0]
        if isinstance(ids, core.Literal):
            return np.asarray(ids.val)
        jaxpr = self._closed.jaxpr
        if ids in jaxpr.invars:
            return jaxpr.invars.index(ids)
        if ids in jaxpr.constvars:
            return np.asarray(self._closed.consts[jaxpr.constvars.index(ids)])
        return None

    def computing_ids(self, places: Sequence[int], known: Sequence[int]) -> Callable[..., Any]:
        """Returns a function of the inputs and of known rows that returns ids."""
        wanted = [self._asked[place].invars[0] for place in places]
        return self._program(known, wanted, self._leading_to(wanted))

    def whole(self) -> Callable[..., Any]:
        """Returns a function of the inputs and of all rows that returns what the program does."""
        every = range(len(self._asked))
        return self._program(every, self._closed.jaxpr.outvars, self._others)

    def _leading_to(self, wanted: Sequence[Any]) -> list[Any]:
        """Returns the equations that have to do with variables of the program."""
        needed = set(wanted)
        kept = []
        for equation in reversed(self._others):
            if needed.intersection(equation.outvars):
                kept.append(equation)
                needed.update(v for v in equation.invars if not isinstance(v, core.Literal))
        return kept[::-1]

    def _program(
        self, rows: Sequence[int], returned: Sequence[Any], equations: Sequence[Any]
    ) -> Callable[..., Any]:
        jaxpr = self._closed.jaxpr
        given = [self._asked[place].outvars[0] for place in rows]
        effects: Any = set().union(*(equation.effects for equation in equations))
        part = jaxpr.replace(
            invars=[*jaxpr.invars, *given],
            outvars=list(returned),
            eqns=list(equations),
            effects=effects,
        )
        return core.jaxpr_as_fun(core.ClosedJaxpr(part, self._closed.consts))
