"""Parts of a mirrored variable that replicas write together, each one its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distribax import context, jax_private
from distribax.execution import frames
from distribax.types import ReduceOp, VariableAggregation, WriteKind
from distribax.variables.placement import PlacedVariable


def may_differ(index: object) -> bool:
    """Tells whether replicas may write different parts: in eager code each has its own numbers."""
    return frames.current() is None or any(map(jax_private.is_tracer, jax.tree.leaves(index)))


def spread(
    variable: PlacedVariable,
    part: jax.Array,
    kind: WriteKind,
    index: Any,
    replica: context.ReplicaContext,
) -> jax.Array:
    """Returns what to write to all of a variable in place of this replica's part.

    Where replicas assign the same elements, their values are combined.
    """
    zeros = jnp.zeros(variable.shape, variable.dtype)
    if kind is not WriteKind.ASSIGN:
        return zeros.at[index].add(part)
    count = jnp.zeros(variable.shape, jnp.int32).at[index].set(1)
    total, count = replica.all_reduce(ReduceOp.SUM, [zeros.at[index].set(part), count])
    if variable.aggregation is VariableAggregation.MEAN:
        total = total / jnp.maximum(count, 1)
    return jnp.where(count > 0, total, variable.read_value())
