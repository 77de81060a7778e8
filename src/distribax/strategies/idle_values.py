"""Reducing values of which some come from idle replicas: their NaNs count for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

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
    divide_by_count,
    leave_out_nans,
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
    cleaned = [_clean(value) for value, _ in pairs]
    kept = [(value, to) for (value, _), (_, to) in zip(cleaned, pairs, strict=True)]
    if op is not ReduceOp.MEAN:
        return ops.batch_reduce(op, kept, options)
    counts = [(count, to) for (_, count), (_, to) in zip(cleaned, pairs, strict=True)]
    sums = ops.batch_reduce(ReduceOp.SUM, [*kept, *counts], options)
    return [
        _divide(total, count)
        for total, count in zip(sums[: len(kept)], sums[len(kept) :], strict=True)
    ]


def _may_be_idle(value: PerReplica | Mirrored) -> bool:
    return isinstance(value, PerReplica) and bool(value.idle.find())


def _clean(value: PerReplica | Mirrored) -> tuple[PerReplica, PerReplica]:
    """Returns the values as they count, and how many replicas count."""
    idle, layout = value.idle.find(), value.layout
    if isinstance(layout, Local):
        frame = frames.current()
        assert isinstance(frame, frames.RunFrame)
        own = jnp.asarray(layout.value)
        is_idle = bool(idle) and frame.variant is not None and frame.variant.is_idle
        kept, count = leave_out_nans(own, is_idle=is_idle)
        return (
            PerReplica.of(Local(kept, layout.mesh, layout.shapes)),
            PerReplica.of(Local(count, layout.mesh)),
        )
    pieces, mesh = value.values, layout.mesh
    indices = find_replicas(pieces, mesh)
    parts = [
        jax_private.call_near(partial(leave_out_nans, is_idle=index in idle), piece)
        for index, piece in zip(indices, pieces, strict=True)
    ]
    kept_pieces, counts = zip(*parts, strict=True)
    return PerReplica.of(Pieces(kept_pieces, mesh)), PerReplica.of(Pieces(counts, mesh))


def _divide(total: Mirrored, count: Mirrored) -> Mirrored:
    """Divides mirrored values, each copy where it is."""
    a, b = total.layout, count.layout
    if isinstance(a, Local) and isinstance(b, Local):
        return Mirrored.of(Local(divide_by_count(a.value, b.value), a.mesh))
    if isinstance(a, Global) and isinstance(b, Global):
        return Mirrored.of(Global(divide_by_count(a.array, b.array), a.mesh, mirrored=True))
    copies = [
        jax_private.call_near(partial(divide_by_count, count=each), copy)
        for copy, each in zip(total.values, count.values, strict=True)
    ]
    return Mirrored.of(Pieces(tuple(copies), a.mesh))
