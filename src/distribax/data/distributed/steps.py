"""Host pipelines that give, step by step, one batch for each local replica."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from distribax.data.dataset import Dataset
from distribax.data.element_spec import Spec
from distribax.data.elements import Element
from distribax.data.plan.plan_node import UnknownSpecError
from distribax.values.layout import Shape


@dataclass(frozen=True)
class Step:
    """The batches of one step.

    Attributes:
        pieces: A batch for each local replica.
        even: Whether the batches of all workers have the same shapes.
        batch: All of this worker's pieces as one batch, if the pipeline made one.
        shapes: The shapes of the arrays in each replica's batch, those of other workers included,
            if they are known.
    """

    pieces: Sequence[Element]
    even: bool
    batch: Element | None = None
    shapes: Sequence[Sequence[Shape]] | None = None


class Steps(abc.ABC):
    """The pipeline that feeds one worker."""

    @abc.abstractmethod
    def pull(self) -> Step:
        """Returns the next step, or raises StopIteration."""

    @abc.abstractmethod
    def skip(self, num_steps: int) -> None:
        """Passes over steps of the saved iterator, after its position was restored."""

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns the position, or raises ValueError if there is none."""

    @abc.abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the pipeline and its threads."""


class SplitSteps(Steps):
    """Global batches, of which each replica gets its piece."""

    def __init__(self, dataset: Dataset) -> None:
        self._iterator = dataset.make_iterator()

    @override
    def pull(self) -> Step:
        batch = next(self._iterator)
        return Step(batch.pieces, batch.even, batch.batch)

    @override
    def skip(self, num_steps: int) -> None:
        for _ in range(num_steps):
            next(self._iterator, None)

    @override
    def get_state(self) -> dict[str, Any]:
        return self._iterator.get_state()

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)

    @override
    def close(self) -> None:
        self._iterator.close()


class DequeueSteps(Steps):
    """Batches of one replica's size, of which each replica takes one.

    With one data set all replicas take from it in turn; with several each has its own.
    """

    def __init__(self, datasets: Sequence[Dataset], num_replicas: int) -> None:
        self._iterators = [dataset.make_iterator() for dataset in datasets]
        self._num_replicas = num_replicas
        # How many batches a step took in the iterator whose position was restored.
        self._num_saved_replicas = num_replicas
        # Where all shapes are fixed, a step that cannot be filled is left out.
        self._is_static = all(_has_static_elements(dataset) for dataset in datasets)

    @override
    def pull(self) -> Step:
        batches: list[Element | None] = []
        for index in range(self._num_replicas):
            iterator = self._iterators[index % len(self._iterators)]
            batches.append(next(iterator, None))
        found = [batch for batch in batches if batch is not None]
        if not found or (self._is_static and len(found) < self._num_replicas):
            raise StopIteration
        pieces = [empty_like(found[0]) if batch is None else batch for batch in batches]
        return Step(pieces, len(found) == len(batches))

    @override
    def skip(self, num_steps: int) -> None:
        for index in range(num_steps * self._num_saved_replicas):
            next(self._iterators[index % len(self._iterators)], None)

    @override
    def get_state(self) -> dict[str, Any]:
        return {
            "pipelines": [iterator.get_state() for iterator in self._iterators],
            "num_replicas": self._num_replicas,
        }

    @override
    def set_state(self, state: dict[str, Any]) -> None:
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
        self._num_saved_replicas = state["num_replicas"]

    @override
    def close(self) -> None:
        for iterator in self._iterators:
            iterator.close()


def is_static(spec: Spec) -> bool:
    """Tells whether all elements have the same shapes."""
    return all(None not in leaf.shape for leaf in jax.tree.leaves(spec))


def _has_static_elements(dataset: Dataset) -> bool:
    if dataset.is_batched is None:
        return False  # Only its elements can tell, and a generator gives them once.
    try:
        return is_static(dataset.element_spec)
    except UnknownSpecError:
        return False  # It has no element, and so nothing to leave out.


def empty_like(piece: Element) -> Element:
    """Returns a batch of the same form without any example; a scalar becomes zero."""

    def empty(leaf: object) -> Element:
        if isinstance(leaf, bytes):
            return b""
        array = np.asarray(leaf)
        return array[:0] if array.ndim else np.zeros_like(array)

    return jax.tree.map(empty, piece)
