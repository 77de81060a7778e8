"""Which part of a global batch a replica has, in a step that `fit` or `evaluate` runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distribax import context
from distribax.execution import frames
from distribax.types import ReduceOp


class ReplicaShare:
    """A replica's part of the batch of a step.

    Attributes:
        weight: The replica's examples over those of all replicas.
    """

    def __init__(self, weight: float | jax.Array) -> None:
        self.weight = weight
        # Arrays that are the same in all replicas because of how they were computed.
        self._same: dict[int, Any] = {}
        # The optimizers whose losses are weighed before gradients are taken.
        self._weighed: dict[int, Any] = {}

    def weigh(self, optimizer: object, loss: jax.Array) -> jax.Array:
        """Returns a loss as it counts in the sum over replicas, of which gradients are taken."""
        self._weighed[id(optimizer)] = optimizer
        return (
            loss
            if isinstance(self.weight, float) and self.weight == 1.0
            else loss * jnp.asarray(self.weight, loss.dtype)
        )

    def has_weighed(self, optimizer: object) -> bool:
        """Tells whether the gradients that an optimizer is given have been weighed already."""
        return id(optimizer) in self._weighed

    def note_same(self, arrays: list[Any]) -> None:
        """Notes arrays that are the same in all replicas."""
        self._same.update((id(array), array) for array in arrays)

    def is_same(self, array: object) -> bool:
        """Tells whether an array is known to be the same in all replicas."""
        return id(array) in self._same


_share: ContextVar[ReplicaShare | None] = ContextVar("distribax_keras_share", default=None)


def current() -> ReplicaShare | None:
    """Returns the share of the replica that runs now; None in a custom training loop."""
    return _share.get()


@contextlib.contextmanager
def enter(batch: object) -> Iterator[ReplicaShare]:
    """Runs a replica's step with a piece of a batch."""
    share = ReplicaShare(_weigh(batch))
    token = _share.set(share)
    try:
        yield share
    finally:
        _share.reset(token)


def _weigh(batch: object) -> float | jax.Array:
    replica = context.get_replica_context()
    count = 1 if replica is None else replica.num_replicas_in_sync
    if replica is None or count == 1:
        return 1.0
    frame = frames.current()
    if isinstance(frame, frames.RunFrame) and frame.variant is None:
        # One program for all: their pieces have one size.
        return 1.0 / count
    own = jnp.float32(np.shape(jax.tree.leaves(batch)[0])[0])
    total: jax.Array = replica.all_reduce(ReduceOp.SUM, own)
    return own / total
