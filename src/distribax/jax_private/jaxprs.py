"""Traced programs (jaxprs): values and lookups that stand in them, and cutting them apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import core as _core
from jax.extend import core
from jax.typing import ArrayLike

from distribax import contracts
from distribax.jax_private.recording import Recorded
from distribax.jax_private.tracing import Trace, Tracer, get_trace
from distribax.types import Identity

_Result = TypeVar("_Result")

# Stands for rows that are not known when a program is traced; it is replaced before it is compiled.
_rows: Any = core.Primitive("distribax_rows")


def _find_type(ids: _core.ShapedArray, *, table: Identity[contracts.Table]) -> _core.ShapedArray:
    asked = table.target
    return _core.ShapedArray((*ids.shape, *asked.shape[1:]), np.dtype(asked.dtype))


_rows.def_abstract_eval(_find_type)


def find_used_inputs(
    fn: Callable[[dict[str, Any], Any], Any], named: dict[str, Any], other: Any
) -> set[str]:
    """Returns the names of those values of `named` that `fn(named, other)` computes with."""
    leaves, tree = jax.tree.flatten(named)
    types = [
        jax.ShapeDtypeStruct(jax.numpy.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves
    ]
    jaxpr = jax.make_jaxpr(fn)(jax.tree.unflatten(tree, types), other).jaxpr
    read = {id(atom) for equation in jaxpr.eqns for atom in equation.invars}
    read |= {id(atom) for atom in jaxpr.outvars}
    inputs = jaxpr.invars[: len(leaves)]
    places = jax.tree.unflatten(tree, [id(atom) in read for atom in inputs])
    return {name for name, is_read in places.items() if any(jax.tree.leaves(is_read))}


def run_in_trace(trace: Trace, fn: Callable[[], _Result]) -> _Result:
    """Runs `fn` as a part of `trace`, although a transformation inside of it may be tracing."""
    with core.set_current_trace(trace):
        return fn()


def find_in_trace(
    value: jax.Array | np.ndarray, trace: Trace | None
) -> jax.Array | np.ndarray | None:
    """Returns what `value` is in `trace`, without its gradient; None if it does not exist there.

    A constant exists everywhere. What `jax.vmap`, a loop or another program has made of a value
    does not exist outside of it.
    """
    while isinstance(value, Tracer) and get_trace(value) is not trace:
        primal = getattr(value, "primal", None)
        if primal is None:
            return None
        value = primal
    return value


def bind_unknown_rows(table: contracts.Table, ids: ArrayLike, trace: Trace) -> jax.Array:
    """Returns an array of the program that `trace` makes, which stands for rows of a table."""
    # JAX compares parameters with those of earlier calls, and tables compare by their values.
    return run_in_trace(trace, lambda: _rows.bind(ids, table=Identity(table)))


class Cut:
    """A recorded program, cut at the rows that are unknown to it.

    Args:
        program: The program.

    Attributes:
        tables: The tables that rows are asked of, in the order of asking.
        groups: Their places, by when they can be asked for: lookups of a later group depend on rows
            of earlier ones.
    """

    def __init__(self, program: Recorded) -> None:
        self._closed = program
        equations = self._closed.jaxpr.eqns
        self._asked = [equation for equation in equations if equation.primitive is _rows]
        self._others = [equation for equation in equations if equation.primitive is not _rows]
        self.tables = [equation.params["table"].target for equation in self._asked]
        self.groups = self._group_lookups()

    def _group_lookups(self) -> list[list[int]]:
        groups: list[list[int]] = []
        level: dict[core.Var, int] = {}
        place = 0
        for equation in self._closed.jaxpr.eqns:
            known = [var for var in equation.invars if not isinstance(var, core.Literal)]
            group = max((level.get(var, 0) for var in known), default=0)
            if equation.primitive is _rows:
                groups.extend([] for _ in range(group + 1 - len(groups)))
                groups[group].append(place)
                place, group = place + 1, group + 1
            level.update(dict.fromkeys(equation.outvars, group))
        return groups

    def find_given_ids(self, place: int) -> int | np.ndarray | None:
        """Returns the ids of a lookup: the index of an input, a constant, or None if computed."""
        ids = self._asked[place].invars[0]
        if isinstance(ids, core.Literal):
            return np.asarray(ids.val)
        jaxpr = self._closed.jaxpr
        if ids in jaxpr.invars:
            return jaxpr.invars.index(ids)
        if ids in jaxpr.constvars:
            return np.asarray(self._closed.consts[jaxpr.constvars.index(ids)])
        return None

    def build_ids_program(self, places: Sequence[int], known: Sequence[int]) -> Callable[..., Any]:
        """Returns a function of the inputs and of known rows that returns ids."""
        wanted = [self._asked[place].invars[0] for place in places]
        return self._build(known, wanted, self._find_equations(wanted))

    def build_whole(self) -> Callable[..., Any]:
        """Returns a function of the inputs and of all rows that returns what the program does."""
        every = range(len(self._asked))
        return self._build(every, self._closed.jaxpr.outvars, self._others)

    def _find_equations(self, wanted: Sequence[core.Var]) -> list[core.JaxprEqn]:
        """Returns the equations that compute some variables of the program."""
        needed = set(wanted)
        kept = []
        for equation in reversed(self._others):
            if needed.intersection(equation.outvars):
                kept.append(equation)
                needed.update(v for v in equation.invars if not isinstance(v, core.Literal))
        return kept[::-1]

    def _build(
        self, rows: Sequence[int], returned: Sequence[core.Var], equations: Sequence[core.JaxprEqn]
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
