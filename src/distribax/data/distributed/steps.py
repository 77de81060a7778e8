"""Host pipelines that give, step by step, one batch for each local replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from distribax.data.dataset import Dataset
from distribax.data.iterator import DatasetIterator
from distribax.data.plan.plan_node import UnknownSpec
from distribax.types import Nest


@dataclass(frozen=True)
class Step:
    """The batches of the local replicas, and whether all workers' have the same shapes."""

    pieces: Sequence[Nest]
    even: bool
    # All of this worker's pieces as one batch, where there is one.
    batch: Nest | None = None


class Steps(Protocol):
    """What feeds one worker."""

    def pull(self) -> Step: ...

    def skip(self, num_steps: int) -> None:
        """Passes over steps of the saved iterator, after its position was restored."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...

    def close(self) -> None: ...


class SplitSteps:
    """Global batches, of which each replica gets its piece."""

    def __init__(self, dataset: Dataset) -> None:
        self._iterator: DatasetIterator = dataset.make_iterator()

    def pull(self) -> Step:
        batch = next(self._iterator)
        return Step(batch.pieces, batch.even, batch.batch)

    def skip(self, num_steps: int) -> None:
        for _ in range(num_steps):
            next(self._iterator, None)

    def get_state(self) -> Any:
        return self._iterator.get_state()

    def set_state(self, state: Any) -> None:
        self._iterator.set_state(state)

    def close(self) -> None:
        self._iterator.close()


class DequeueSteps:
    """Batches of one replica's size, of which each replica takes one.

    With one data set all replicas take from it in turn; with several each has its own.
    """

    def __init__(self, datasets: Sequence[Dataset], num_replicas: int) -> None:
        self._iterators = [dataset.make_iterator() for dataset in datasets]
        self._num_replicas = num_replicas
        # How many batches a step of the iterator whose position was restored has taken.
        self._saved_replicas = num_replicas
        # Where shapes are promised, a step that cannot be filled is left out.
        self._static = all(_is_static(dataset) for dataset in datasets)

    def pull(self) -> Step:
        batches: list[Nest | None] = []
        for index in range(self._num_replicas):
            iterator = self._iterators[index % len(self._iterators)]
            batches.append(next(iterator, None))
        found = [batch for batch in batches if batch is not None]
        if not found or (self._static and len(found) < self._num_replicas):
            raise StopIteration
        pieces = [empty_like(found[0]) if batch is None else batch for batch in batches]
        return Step(pieces, len(found) == len(batches))

    def skip(self, num_steps: int) -> None:
        for index in range(num_steps * self._saved_replicas):
            next(self._iterators[index % len(self._iterators)], None)

    def get_state(self) -> Any:
        return {
            "pipelines": [iterator.get_state() for iterator in self._iterators],
            "num_replicas": self._num_replicas,
        }

    def set_state(self, state: Any) -> None:
        pipelines = state.get("pipelines")
        if pipelines is None:
            raise ValueError(
                "set_state: the position was saved by an iterator of "
                "experimental_distribute_dataset, this one is of distribute_datasets_from_function."
            )
        if len(pipelines) != len(self._iterators):
            raise ValueError(
                f"set_state: the saved position has {len(pipelines)} pipelines, this iterator has "
                f"{len(self._iterators)}. With InputReplicationMode.PER_REPLICA a position can be "
                "restored only with the same number of replicas."
            )
        for iterator, own in zip(self._iterators, pipelines, strict=True):
            iterator.set_state(own)
        self._saved_replicas = state["num_replicas"]

    def close(self) -> None:
        for iterator in self._iterators:
            iterator.close()


def _is_static(dataset: Dataset) -> bool:
    if dataset.is_batched is None:
        return False  # Only its elements can tell, and a generator gives them once.
    try:
        spec = dataset.element_spec
    except UnknownSpec:
        return False  # It has no element, and so nothing to leave out.
    return all(None not in leaf.shape for leaf in jax.tree.leaves(spec))


def empty_like(piece: Nest) -> Nest:
    """Returns a batch of the same form without any example; a scalar becomes zero."""

    def empty(leaf: Any) -> Any:
        if isinstance(leaf, bytes):
            return b""
        array = np.asarray(leaf)
        return array[:0] if array.ndim else np.zeros_like(array)

    return jax.tree.map(empty, piece)
