"""Distributed input is read outside the replicas, which are given their parts of it."""

from __future__ import annotations

from distribax import context
from distribax.errors import ReplicaInputError


def require_outside_replica(what: str) -> None:
    """Refuses `what` inside a replica, where each one would take a batch meant for all of them."""
    if context.get_replica_context() is not None and context.has_strategy():
        raise ReplicaInputError(
            f"{what}: called inside strategy.run(), where each replica would take a batch that is "
            "meant for all of them. Call it outside and pass each replica its part: "
            "strategy.run(fn, args=(next(iterator),))."
        )
