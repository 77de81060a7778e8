"""Compiled steps that look up rows of tables in other processes.

The rows are inputs of the step, fetched for each call: what the step computes before a lookup is a
small program of its own, which returns the ids; the host fetches the rows and feeds them. Lookups
that do not depend on each other's rows are fetched together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from distribax import contracts, jax_private
from distribax.execution.state.role_arguments import Exchange
from distribax.execution.traces import frames
from distribax.jax_private import jaxprs
from distribax.topology import launch_lock


def look_up(
    frame: frames.Frame, table: contracts.Table, ids: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array | np.ndarray]:
    """Returns rows, and their ids, as values of the step that is being traced."""
    function = frame.function
    here = jaxprs.find_in_trace(ids, function.trace)
    if here is None:
        raise RuntimeError(
            f"embedding_lookup: the ids for {table.described} are computed inside jax.vmap, "
            "jax.lax.scan, jax.jit or another JAX transformation, and the rows are fetched before "
            "that runs. Look up all rows outside of it, and pass them in: "
            "rows = dx.embedding_lookup(table, ids); jax.vmap(fn)(rows)."
        )
    return jaxprs.bind_unknown_rows(table, here, function.trace), here


@dataclass
class _LookupGroup:
    """Lookups that are fetched together."""

    places: list[int]
    # For each of them: an input of the program, constant ids, or None if they are computed.
    given: list[int | np.ndarray | None]
    known: list[int]
    compute: Callable[..., list[jax.Array]] | None


@dataclass(frozen=True)
class ReadyCall:
    """Calls a program with rows that were fetched for it."""

    whole: jax.stages.Wrapped
    num_donated: int
    form: PyTreeDef
    rows: list[jax.Array]

    def __call__(self, *nests: object) -> Any:
        """Runs the program with its inputs, and returns its results."""
        return jax.tree.unflatten(self.form, self.whole(*self._split(nests), self.rows))

    def lower(self, *nests: object) -> jax.stages.Lowered:
        """Returns what computes with the rows as JAX has it before it is compiled."""
        return self.whole.lower(*self._split(nests), self.rows)

    def _split(self, nests: object) -> tuple[list[Any], list[Any]]:
        """Returns the inputs that may be overwritten, and the others."""
        inputs: list[Any] = jax.tree.leaves(nests)
        return inputs[: self.num_donated], inputs[self.num_donated :]


class LookupCall:
    """Calls a program that looks up rows.

    Args:
        cut: The program, cut at its lookups.
        num_donated: How many of its inputs, the first ones, may be overwritten.
        form: The nest of its results.
    """

    def __init__(
        self,
        cut: jaxprs.Cut,
        num_donated: int,
        form: PyTreeDef,
    ) -> None:
        self._num_donated = num_donated
        self._form = form
        self._tables = cut.tables
        self._groups: list[_LookupGroup] = []
        known: list[int] = []
        for places in cut.groups:
            given = [cut.find_given_ids(place) for place in places]
            computed = [p for p, ids in zip(places, given, strict=True) if ids is None]
            compute = jax.jit(cut.build_ids_program(computed, known)) if computed else None
            self._groups.append(_LookupGroup(places, given, list(known), compute))
            known.extend(places)
        whole = cut.build_whole()

        def step(
            donated: list[jax.Array], others: list[jax.Array], rows: list[jax.Array]
        ) -> list[jax.Array]:
            return whole(*donated, *others, *rows)

        self._whole = jax.jit(step, donate_argnums=0)

    def exchange(self, exchange: Exchange) -> LookupCall:
        """Returns the same program, which looks up rows of other tables."""
        made = copy.copy(self)
        made._tables = [exchange(table) for table in self._tables]
        return made

    def prepare(self, look: Callable[[], tuple[list[Any], ...]]) -> ReadyCall:
        """Fetches the rows that a call needs.

        Args:
            look: Returns the inputs of the program as they are now. Other threads may change
                variables while rows are fetched.

        Returns:
            What the call needs no more than its inputs for.
        """
        rows: list[Any] = [None] * len(self._tables)
        for group in self._groups:
            self._fetch(group, lambda: jax.tree.leaves(look()), rows)
        return ReadyCall(self._whole, self._num_donated, self._form, rows)

    def _fetch(self, group: _LookupGroup, look: Callable[[], list[Any]], rows: list[Any]) -> None:
        """Fetches the rows of a group, those of one source together, into `rows`."""
        computed: Iterator[jax.Array] = iter(())
        with launch_lock:
            inputs = look()
            if group.compute is not None:
                computed = iter(group.compute(*inputs, *(rows[place] for place in group.known)))
            # Now, as an input may be a variable that another thread overwrites.
            given = [_to_host(inputs[ids]) if isinstance(ids, int) else ids for ids in group.given]
        by_source: dict[contracts.Source, list[tuple[int, np.ndarray]]] = {}
        for place, ids in zip(group.places, given, strict=True):
            source = self._tables[place].source
            assert source is not None
            on_host = _to_host(next(computed)) if ids is None else ids
            by_source.setdefault(source, []).append((place, on_host))
        for source, wanted in by_source.items():
            fetched = source.pull_rows([(self._tables[place], ids) for place, ids in wanted])
            for (place, _), array in zip(wanted, fetched, strict=True):
                rows[place] = array


def _to_host(ids: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(jax_private.pick_copy(ids) if isinstance(ids, jax.Array) else ids)
