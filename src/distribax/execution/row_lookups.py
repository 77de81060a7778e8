"""Compiled steps that look up rows of tables in other processes.

The rows are inputs of the step, fetched for each call: what the step computes before a lookup is a
small program of its own, which returns the ids; the host fetches the rows and feeds them. Lookups
that do not depend on each other's rows are fetched together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from distribax import contracts, jax_private
from distribax.errors import ControlFlow
from distribax.execution import frames
from distribax.jax_private import jaxprs


class NeedStages(ControlFlow):
    """Asks the engine to trace again, as a step that looks up rows."""


def look_up(
    frame: frames.Frame, table: contracts.Table, ids: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array | np.ndarray]:
    """Returns rows, and their ids, as values of the step that is being traced."""
    function = frame.function
    if not function.has_stages:
        raise NeedStages
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
class _Stage:
    """Lookups that are fetched together."""

    places: list[int]
    # For each of them: an input of the program, constant ids, or None if they are computed.
    given: list[int | np.ndarray | None]
    known: list[int]
    compute: Callable[..., list[jax.Array]] | None


@dataclass
class StagedCall:
    """Calls a step that looks up rows; it is traced by the first call.

    Args:
        pure: The step as a function of its inputs, without side effects. The memory of its first
            two arguments is used for the results.
        unlocked: Lets other threads start programs while this one waits.
    """

    pure: Callable[..., object]
    unlocked: Callable[[], AbstractContextManager[None]]
    _stages: list[_Stage] = field(default_factory=list)
    _whole: Callable[..., list[jax.Array]] | None = None
    _tables: list[contracts.Table] = field(default_factory=list)
    _out_tree: Any = None

    def __call__(
        self, given: list[Any], own: list[Any], read: list[Any], dynamic: list[Any]
    ) -> Any:
        if self._whole is None:
            self._whole = self._trace(given, own, read, dynamic)
        donated = jax.tree.leaves((given, own))
        inputs = [*donated, *jax.tree.leaves((read, dynamic))]
        rows: list[jax.Array | None] = [None] * len(self._tables)
        for stage in self._stages:
            self._fetch(stage, inputs, rows)
        results = self._whole(donated, inputs[len(donated) :], rows)
        return jax.tree.unflatten(self._out_tree, results)

    def _trace(self, *args: list[Any]) -> Callable[..., list[jax.Array]]:
        cut = jaxprs.Cut(self.pure, args)
        known: list[int] = []
        for places in cut.stages:
            given = [cut.find_given_ids(place) for place in places]
            computed = [p for p, ids in zip(places, given, strict=True) if ids is None]
            compute = jax.jit(cut.build_ids_program(computed, known)) if computed else None
            self._stages.append(_Stage(places, given, list(known), compute))
            known.extend(places)
        self._tables, self._out_tree = cut.tables, cut.out_tree
        whole = cut.build_whole()

        def step(
            donated: list[jax.Array], others: list[jax.Array], rows: list[jax.Array]
        ) -> list[jax.Array]:
            return whole(*donated, *others, *rows)

        return jax.jit(step, donate_argnums=0)

    def _fetch(self, stage: _Stage, inputs: list[Any], rows: list[jax.Array | None]) -> None:
        """Fetches the rows of a stage, those of one source together, into `rows`."""
        computed: Iterator[jax.Array] = iter(())
        if stage.compute is not None:
            computed = iter(stage.compute(*inputs, *(rows[place] for place in stage.known)))
        by_source: dict[contracts.Source, list[tuple[int, np.ndarray]]] = {}
        with self.unlocked():
            for place, given in zip(stage.places, stage.given, strict=True):
                ids = inputs[given] if isinstance(given, int) else given
                source = self._tables[place].source
                assert source is not None
                on_host = _to_host(next(computed) if ids is None else ids)
                by_source.setdefault(source, []).append((place, on_host))
            for source, asked in by_source.items():
                fetched = source.rows([(self._tables[place], ids) for place, ids in asked])
                for (place, _), array in zip(asked, fetched, strict=True):
                    rows[place] = array


def _to_host(ids: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(jax_private.pick_copy(ids) if isinstance(ids, jax.Array) else ids)
