"""Combining `dx.IndexedSlices` over replicas: rows are joined, and those of one number add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from distribax import jax_private
from distribax.types import ReduceOp
from distribax.values import (
    DistributedValues,
    IndexedSlices,
    Local,
    Mirrored,
    PerReplica,
    Pieces,
    is_slices,
    is_wrapped,
)


def find_slices(value: object) -> IndexedSlices | None:
    """Returns rows and numbers of all replicas, each a distributed value; None if it is no such.

    Args:
        value: What `strategy.run` has returned for rows of each replica, or a `dx.PerReplica` of
            them.

    Returns:
        The rows and numbers; one of them may be shared by all replicas.
    """
    if is_slices(value):
        return value if any(map(is_wrapped, (value.values, value.indices))) else None
    if not is_wrapped(value) or not isinstance(value.layout, Pieces):
        return None
    pieces, mesh = value.layout.pieces, value.layout.mesh
    if not all(map(is_slices, pieces)):
        return None
    values = type(value).of(Pieces(tuple(piece.values for piece in pieces), mesh))
    indices = type(value).of(Pieces(tuple(piece.indices for piece in pieces), mesh))
    return IndexedSlices.tree_unflatten(pieces[0].dense_shape, (values, indices))


def reduce_slices(
    reduce_op: ReduceOp, slices: IndexedSlices, gather: Callable[[Any], Any]
) -> IndexedSlices:
    """Joins the rows of all replicas.

    Args:
        reduce_op: SUM or MEAN; a mean divides the rows by the number of replicas.
        slices: As `find_slices` returns them.
        gather: Joins the replicas' values along dimension 0.

    Returns:
        The rows of all replicas with their numbers.
    """
    parts: list[Any] = [slices.values, slices.indices]
    like: Any = next(part for part in parts if is_wrapped(part))
    values, indices = (
        gather(part) if is_wrapped(part) else gather(_repeat(part, like)) for part in parts
    )
    if reduce_op is ReduceOp.MEAN:
        layout = like.layout
        count = len(like.values) if layout.mesh is None else layout.mesh.size
        values = _map(lambda value: value / count, values)
    return IndexedSlices(values, indices, slices.dense_shape)


def _repeat(part: Any, like: DistributedValues) -> PerReplica:
    """Returns a value that all replicas share as one of each replica."""
    layout = like.layout
    if isinstance(layout, Local):
        return PerReplica.of(Local(jnp.asarray(part), layout.mesh))
    return PerReplica.of(Pieces((part,) * len(like.values), layout.mesh))


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    """Applies `fn` to each copy of a value, where the copy is."""
    if not isinstance(value, Mirrored):
        return fn(value)
    layout = value.layout
    if isinstance(layout, Local):
        return Mirrored.of(Local(fn(layout.value), layout.mesh))
    copies = tuple(jax_private.call_near(fn, piece) for piece in value.values)
    return Mirrored.of(Pieces(copies, layout.mesh))


def refuse_slices(value: object, what: str) -> None:
    """Raises if rows with numbers are to be joined along a dimension, which they do not have."""
    if is_slices(value) or find_slices(value) is not None:
        raise NotImplementedError(
            f"{what}: a dx.IndexedSlices cannot be gathered. Combine the rows of all replicas by "
            "their numbers, all_reduce('SUM', g) or strategy.reduce('SUM', g, axis=None), or "
            "gather the whole array, jnp.asarray(g)."
        )
