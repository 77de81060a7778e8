"""Compiled replicas with pieces of different shapes, as of a last batch: one program all the same.

The replicas' code is traced once for each size, as a variant of the program; each device runs its
own. The collectives are those of all, so the variants must meet in the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from distribax import jax_private
from distribax.errors import HostMode, HostOnly
from distribax.execution.programs.results import Held, Part
from distribax.execution.replicas.outcome import Outcome
from distribax.execution.traces.variant import Known, Variant
from distribax.topology import REPLICA_AXIS
from distribax.types import is_python_number
from distribax.values import Form, Padded, PerReplica, Pieces, find_idle
from distribax.values.layout import Shape, find_local_replicas

# A program of more variants would take longer to compile than it saves.
_MAX_VARIANTS = 8
# How often the code is traced until the variants know each other's shapes.
_MAX_ROUNDS = 16

Call: TypeAlias = Callable[[Sequence[jax.Array], Sequence[jax.Array], Variant], Outcome]
"""Runs a replica's code with its inputs and its values of variables."""


def run_uneven(
    call: Call,
    local_inputs: Sequence[jax.Array],
    local_states: Sequence[jax.Array],
    padded: Sequence[Padded],
    mesh: Mesh,
) -> Outcome:
    """Runs the replicas' code, in an SPMD program, with pieces of different shapes.

    Args:
        call: Runs it for one size of the pieces.
        local_inputs: The inputs, of which some are padded to the largest size.
        local_states: The replica's values of variables and captured values.
        padded: How the padded inputs are stored.
        mesh: The mesh of the replicas.

    Returns:
        What the code has returned.

    Raises:
        HostOnly: The replicas cannot be one program.
    """
    kinds = list(zip(*(layout.shapes for layout in padded), strict=True))
    distinct = list(dict.fromkeys(kinds))
    if len(distinct) > _MAX_VARIANTS:
        raise HostOnly(f"the pieces have {len(distinct)} different sizes", HostMode.EAGER)
    choices = tuple(distinct.index(kind) for kind in kinds)
    known = Known(choices, find_idle(padded, mesh.size).find())
    flat, count = [*local_inputs, *local_states], len(local_inputs)
    try:
        outcomes, traced = _trace_all(call, flat, count, known, len(distinct))
        plan = _match(outcomes, [each.out_avals for each in traced], known, mesh)
        choice = jnp.asarray(choices)[lax.axis_index(REPLICA_AXIS)]
        outputs = jax_private.run_variants(traced, flat, choice, REPLICA_AXIS)
    except (jax_private.VariantsDiffer, jax.errors.UnexpectedTracerError) as error:
        raise HostOnly(str(error), HostMode.EAGER) from error
    return replace(outcomes[0], plan=plan, outputs=outputs)


def _trace_all(
    call: Call, flat: Sequence[jax.Array], count: int, known: Known, num_variants: int
) -> tuple[list[Outcome], list[Any]]:
    """Traces every variant, until each knows what it has to know about the others."""
    for _ in range(_MAX_ROUNDS):
        variants = [Variant(index, known) for index in range(num_variants)]
        traces = [_trace(call, flat, count, variant) for variant in variants]
        outcomes = [trace.outcome for trace in traces if trace.outcome is not None]
        if known.learn(variants, [outcome.written for outcome in outcomes]):
            continue
        for trace in traces:
            if trace.error is not None:
                raise trace.error
        return outcomes, [trace.traced for trace in traces]
    raise jax_private.VariantsDiffer("the replicas' shapes depend on each other without an end")


@dataclass(frozen=True)
class _Trace:
    """The trace of one variant, or the error that has ended it."""

    outcome: Outcome | None = None
    traced: Any = None
    error: Exception | None = None


def _trace(call: Call, flat: Sequence[jax.Array], count: int, variant: Variant) -> _Trace:
    outcome: Outcome | None = None

    def run(*values: jax.Array) -> list[jax.Array]:
        nonlocal outcome
        outcome = call(values[:count], values[count:], variant)
        return outcome.outputs

    try:
        traced = jax.make_jaxpr(run)(*flat)
    except Exception as error:
        # Raised unless it comes from shapes that are still wrong.
        return _Trace(error=error)
    return _Trace(outcome, traced)


def _match(
    outcomes: Sequence[Outcome], avals: Sequence[Sequence[Any]], known: Known, mesh: Mesh
) -> list[Part]:
    """Returns what the variants return as one plan."""
    if any(outcome.tree != outcomes[0].tree for outcome in outcomes):
        raise jax_private.VariantsDiffer("the replicas return different structures")
    columns = zip(*avals, strict=True)
    plan: list[Part] = []
    for parts in zip(*(outcome.plan for outcome in outcomes), strict=True):
        held = [part.value for part in parts if isinstance(part, Held)]
        if len(held) == len(parts):
            plan.append(_match_held(held, known, mesh))
        elif any(part != parts[0] for part in parts):
            raise jax_private.VariantsDiffer("the replicas return different kinds of values")
        else:
            shapes = [aval.shape for aval in next(columns)]
            plan.append(_match_arrays(parts[0], shapes, known, mesh))
    return plan


def _match_held(values: Sequence[object], known: Known, mesh: Mesh) -> Held:
    first = values[0]
    if all(value is first or (is_python_number(value) and value == first) for value in values):
        return Held(first)
    own = tuple(values[known.choices[index]] for index in find_local_replicas(mesh))
    return Held(PerReplica.of(Pieces(own, mesh)))


def _match_arrays(part: Part, shapes: Sequence[Shape], known: Known, mesh: Mesh) -> Part:
    if all(shape == shapes[0] for shape in shapes):
        return part
    if not isinstance(part, Form) or part.mirrored:
        raise jax_private.VariantsDiffer("a value that replicas share has several shapes")
    by_replica = tuple(shapes[choice] for choice in known.choices)
    return Form(mesh, shapes=by_replica, idle=known.idle)
