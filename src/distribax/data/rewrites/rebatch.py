"""Splitting batches over workers and replicas."""

from __future__ import annotations

from collections.abc import Callable

from distribax.data import elements as nests
from distribax.data.elements import Element
from distribax.data.plan.order import Repeat
from distribax.data.plan.pieces import WorkerPart, cut, piece_size
from distribax.data.plan.plan_node import Node, Probe
from distribax.data.plan.transforms import Prefetch, WithOptions


def split_batch(batch: Element, num_replicas: int) -> list[Element]:
    """Splits a batch into one piece for each replica, in order, without copying.

    A piece has ceil(size / num_replicas) rows; the last pieces may be smaller or empty.

    >>> import numpy as np
    >>> [piece.tolist() for piece in split_batch(np.arange(4), 3)]
    [[0, 1], [2, 3], []]
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas={num_replicas} is too small. Expected at least 1.")
    size = piece_size(nests.num_rows(batch), num_replicas)
    return list(cut(batch, size, num_replicas))


def require_batched(plan: Node, probe: Probe) -> None:
    """Refuses a plan whose elements are known not to be batches."""
    if plan.is_batched(probe) is False:
        raise ValueError(
            "the data set is not batched, so there is no batch to divide among the replicas. "
            "Batch it by the global batch size first, for example "
            "dataset.batch(per_replica_batch_size * strategy.num_replicas_in_sync)."
        )


def add_worker_part(plan: Node, make: Callable[[Node], WorkerPart]) -> Node:
    """Returns the plan cut for one worker by the step that `make` puts on a node.

    The cut goes below steps that do not look at elements, so that a prefetch buffer holds the
    worker's part only and a fused batch fetches only its rows.
    """
    if isinstance(plan, (Prefetch, WithOptions, Repeat)):
        return plan.with_inputs((add_worker_part(plan.input, make),))
    return make(plan)
