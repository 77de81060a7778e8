"""Reducing values of which some come from idle replicas: their NaNs count for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribax import jax_private
from distribax.collectives import CommunicationOptions, CrossDeviceOps
from distribax.execution import frames
from distribax.types import ReduceOp
from distribax.values import (
    Global,
    Local,
    Mirrored,
    PerReplica,
    Pieces,
    divide,
    find_dtype,
    leave_out_nans,
    widen,
)
from distribax.values.layout import find_replicas


def reduce(
    ops: CrossDeviceOps,
    op: ReduceOp,
    pairs: Sequence[tuple[Any, object]],
    options: CommunicationOptions | None,
) -> list[Any]:
    """Reduces distributed values to destinations.

    Args:
        ops: The algorithm.
        op: SUM or MEAN.
        pairs: The values, each with its destinations.
        options: Hints for the algorithm.

    Returns:
        The results, in order.
    """
    if not any(_may_be_idle(value) for value, _ in pairs):
        return ops.batch_reduce(op, pairs, options)
    cleaned = [_clean(value, op) for value, _ in pairs]
    kept = [(value, to) for (value, _), (_, to) in zip(cleaned, pairs, strict=True)]
    if op is not ReduceOp.MEAN:
        return ops.batch_reduce(op, kept, options)
    counts = [(count, to) for (_, count), (_, to) in zip(cleaned, pairs, strict=True)]
    sums = ops.batch_reduce(ReduceOp.SUM, [*kept, *counts], options)
    dtypes = [find_dtype(value.layout) for value, _ in pairs]
    return list(map(_divide, sums[: len(kept)], sums[len(kept) :], dtypes))


def _may_be_idle(value: PerReplica | Mirrored) -> bool:
    return isinstance(value, PerReplica) and bool(value.idle.find())


def _clean(value: PerReplica | Mirrored, op: ReduceOp) -> tuple[PerReplica, PerReplica]:
    """Returns the values as they are to be added, and how many replicas count."""

    def clean(own: jax.Array, *, is_idle: bool) -> tuple[jax.Array, jax.Array]:
        kept, count = leave_out_nans(own, is_idle=is_idle)
        return widen(kept) if op is ReduceOp.MEAN else kept, count

    idle, layout = value.idle.find(), value.layout
    if isinstance(layout, Local):
        frame = frames.current()
        assert isinstance(frame, frames.RunFrame)
        own = jnp.asarray(layout.value)
        is_idle = bool(idle) and frame.variant is not None and frame.variant.is_idle
        kept, count = clean(own, is_idle=is_idle)
        return (
            PerReplica.of(Local(kept, layout.mesh, layout.shapes)),
            PerReplica.of(Local(count, layout.mesh)),
        )
    pieces, mesh = value.values, layout.mesh
    indices = find_replicas(pieces, mesh)
    parts = [
        jax_private.call_near(partial(clean, is_idle=index in idle), piece)
        for index, piece in zip(indices, pieces, strict=True)
    ]
    kept_pieces, counts = zip(*parts, strict=True)
    return PerReplica.of(Pieces(kept_pieces, mesh)), PerReplica.of(Pieces(counts, mesh))


def _divide(total: Mirrored, count: Mirrored, dtype: np.dtype[Any]) -> Mirrored:
    """Divides mirrored values, each copy where it is."""
    a, b = total.layout, count.layout
    if isinstance(a, Local) and isinstance(b, Local):
        return Mirrored.of(Local(divide(a.value, b.value, dtype), a.mesh))
    if isinstance(a, Global) and isinstance(b, Global):
        return Mirrored.of(Global(divide(a.array, b.array, dtype), a.mesh, mirrored=True))
    copies = [
        jax_private.call_near(partial(divide, count=each, dtype=dtype), copy)
        for copy, each in zip(total.values, count.values, strict=True)
    ]
    return Mirrored.of(Pieces(tuple(copies), a.mesh))
