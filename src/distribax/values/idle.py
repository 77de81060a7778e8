"""Idle replicas: those whose piece of a batch is empty, so that what they compute means nothing.

A replica with an empty piece runs the step like the others. A mean over no examples is NaN, and one
NaN would spoil the sums, means and statistics of all. So whoever combines values of replicas asks
here which of them are idle, and leaves out the NaNs of those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from distribax import jax_private
from distribax.types import ReduceOp
from distribax.values.layout import Evenness, Layout, Padded, Pieces, find_replicas
from distribax.values.means import divide, widen


class IdleReplicas:
    """Which replicas of a run are idle.

    If all of them were, none is: then there is nothing that their values could spoil.

    Args:
        known: The indices of idle replicas, those of all processes included.
        local: For each argument of which only this process's pieces are known, the indices of
            replicas whose pieces are empty.
        num_replicas: The number of replicas of all processes.
    """

    def __init__(
        self,
        known: Iterable[int] = (),
        local: Sequence[Sequence[int]] = (),
        num_replicas: int | None = None,
    ) -> None:
        self._known = frozenset(known)
        self._local = local
        self._num_replicas = num_replicas

    def has(self, replica_id: int) -> bool:
        """Tells whether a replica of this process is idle, without asking other processes."""
        if any(replica_id in empty for empty in self._local):
            return True
        return replica_id in (self._known if self._local else self.find())

    def find(self) -> frozenset[int]:
        """Returns the indices of the idle replicas.

        If other processes must be asked, all of them must call it; they are asked once.
        """
        if self._local:
            own = json.dumps(self._local)
            texts = jax_private.run_outside_trace(lambda: jax_private.gather_texts(own))
            for empty in zip(*map(json.loads, texts), strict=True):
                found = frozenset(index for indices in empty for index in indices)
                self._known |= found if len(found) != self._num_replicas else frozenset()
            self._local = ()
        return (
            frozenset() if self._known and len(self._known) == self._num_replicas else self._known
        )


NONE_IDLE = IdleReplicas()


def find_idle(layouts: Iterable[Layout], num_replicas: int) -> IdleReplicas:
    """Returns which replicas are idle in a run, given its distributed arguments.

    Args:
        layouts: How the arguments are stored that are not the same in all replicas.
        num_replicas: The number of replicas of all processes.
    """
    known: set[int] = set()
    local: list[list[int]] = []
    for layout in layouts:
        if isinstance(layout, Padded):
            known.update(index for index, shape in enumerate(layout.shapes) if shape[0] == 0)
        elif isinstance(layout, Pieces):
            indices = find_replicas(layout.pieces, layout.mesh)
            empty = [i for i, piece in zip(indices, layout.pieces, strict=True) if _is_empty(piece)]
            if len(layout.pieces) < num_replicas and layout.evenness is not Evenness.EVEN:
                local.append(empty)
            elif len(empty) != num_replicas:
                known.update(empty)
    if not known and not local:
        return NONE_IDLE
    return IdleReplicas(known, local, num_replicas)


def _is_empty(piece: object) -> bool:
    shape: tuple[int, ...] = getattr(piece, "shape", ())
    return shape[:1] == (0,)


def leave_out_nans(value: jax.Array, *, is_idle: bool) -> tuple[jax.Array, jax.Array]:
    """Returns a replica's value as it counts, and whether it counts, as 1 or 0.

    One of an idle replica that has a NaN counts as zeros.
    """
    if not is_idle or not jnp.issubdtype(value.dtype, jnp.inexact):
        return value, jnp.ones((), jnp.float32)
    counts = ~jnp.isnan(value).any()
    return jnp.where(counts, value, jnp.zeros_like(value)), counts.astype(jnp.float32)


def reduce_without_idle(
    op: ReduceOp,
    values: Sequence[jax.Array],
    reduce: Callable[[ReduceOp, list[jax.Array]], list[jax.Array]],
    idle: frozenset[int],
    *,
    is_idle: bool,
) -> list[jax.Array]:
    """Combines values over replicas inside an SPMD program; the NaNs of idle ones count nothing.

    Args:
        op: How to combine them.
        values: This replica's values.
        reduce: Combines values of all replicas.
        idle: The idle replicas.
        is_idle: Whether this replica is one of them.
    """
    if not idle:
        return reduce(op, list(values))
    parts = [leave_out_nans(value, is_idle=is_idle) for value in values]
    kept = [value for value, _ in parts]
    if op is not ReduceOp.MEAN:
        return reduce(op, kept)
    sums = reduce(ReduceOp.SUM, [*map(widen, kept), *(count for _, count in parts)])
    dtypes = [value.dtype for value in kept]
    return list(map(divide, sums[: len(kept)], sums[len(kept) :], dtypes))
