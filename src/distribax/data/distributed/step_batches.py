"""Host pipelines that give, step by step, one batch for each local replica."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from typing_extensions import override

from distribax.data.dataset import Dataset
from distribax.data.element_spec import Spec
from distribax.data.elements import Element
from distribax.data.iterator import DatasetIterator
from distribax.data.plan.plan_node import UnknownSpecError
from distribax.values.layout import Shape


@dataclass(frozen=True)
class StepBatches:
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


Agree: TypeAlias = Callable[[StepBatches | None], StepBatches]
"""Makes of this worker's step, None at the end of its data, the one that all workers take together.

It raises StopIteration when all of them are to end.
"""


class Steps(abc.ABC):
    """The pipeline that feeds one worker.

    Args:
        iterators: Where batches come from, in turn.
        batches_per_step: How many batches a step takes.
        agree: How workers with their own data agree; None if they need not.
    """

    def __init__(
        self, iterators: Sequence[DatasetIterator], batches_per_step: int, agree: Agree | None
    ) -> None:
        self._iterators = iterators
        # How many batches a step took in the iterator whose position was restored.
        self._batches_per_saved_step = batches_per_step
        self._agree = agree

    def pull(self) -> StepBatches:
        """Returns the next step, or raises StopIteration."""
        if self._agree is None:
            return self._pull_own()
        try:
            step: StepBatches | None = self._pull_own()
        except StopIteration:
            step = None
        return self._agree(step)

    @abc.abstractmethod
    def _pull_own(self) -> StepBatches:
        """Returns the next step of this worker, or raises StopIteration."""

    def skip(self, num_steps: int) -> None:
        """Passes over steps of the saved iterator, after its position was restored."""
        for index in range(num_steps * self._batches_per_saved_step):
            self._take(index % len(self._iterators))

    def _take(self, place: int) -> Any:
        """Returns the next batch of an iterator, or None at its end."""
        return next(self._iterators[place], None)

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Returns the position, or raises ValueError if there is none."""

    @abc.abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position that `get_state` returned."""

    def close(self) -> None:
        """Ends the pipeline and its threads."""
        for iterator in self._iterators:
            iterator.close()


class SplitSteps(Steps):
    """Global batches, of which each replica gets its piece."""

    def __init__(self, dataset: Dataset, agree: Agree | None = None) -> None:
        self._iterator = dataset.make_iterator()
        super().__init__([self._iterator], 1, agree)

    @override
    def _pull_own(self) -> StepBatches:
        batch = next(self._iterator)
        return StepBatches(batch.pieces, batch.even, batch.batch)

    @override
    def get_state(self) -> dict[str, Any]:
        return self._iterator.get_state()

    @override
    def set_state(self, state: dict[str, Any]) -> None:
        self._iterator.set_state(state)


class DequeueSteps(Steps):
    """Batches of one replica's size, of which each replica takes one.

    With one data set all replicas take from it in turn; with several each has its own.
    """

    def __init__(
        self, datasets: Sequence[Dataset], num_replicas: int, agree: Agree | None = None
    ) -> None:
        iterators = [dataset.make_iterator() for dataset in datasets]
        super().__init__(iterators, num_replicas, agree)
        self._num_replicas = num_replicas
        # Where all shapes are fixed, a step that cannot be filled is left out.
        self._is_static = all(_has_static_elements(dataset) for dataset in datasets)
        self._specs = [dataset.element_spec for dataset in datasets] if self._is_static else []

    @override
    def _take(self, place: int) -> Element | None:
        batch = super()._take(place)
        if self._is_static and batch is not None:
            # What a function returns may vary with the values, which the spec does not tell.
            self._is_static = list_shapes(batch) == list_shapes(self._specs[place])
        return batch

    @override
    def _pull_own(self) -> StepBatches:
        batches: list[Element | None] = [
            self._take(index % len(self._iterators)) for index in range(self._num_replicas)
        ]
        found = [batch for batch in batches if batch is not None]
        if not found or (self._is_static and len(found) < self._num_replicas):
            raise StopIteration
        pieces = [make_empty(found[0]) if batch is None else batch for batch in batches]
        return StepBatches(pieces, len(found) == len(batches))

    @override
    def get_state(self) -> dict[str, Any]:
        return {
            "pipelines": [iterator.get_state() for iterator in self._iterators],
            "num_replicas": self._num_replicas,
            "is_static": self._is_static,
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
        self._batches_per_saved_step = state["num_replicas"]
        self._is_static = self._is_static and state.get("is_static", True)


def is_static(spec: Spec) -> bool:
    """Tells whether all elements have the same shapes."""
    return all(None not in leaf.shape for leaf in jax.tree.leaves(spec))


def list_shapes(nest: Element | Spec) -> list[Shape]:
    """Returns the shapes of the arrays in an element, or of what a spec describes."""
    return [np.shape(leaf) for leaf in jax.tree.leaves(nest)]


def _has_static_elements(dataset: Dataset) -> bool:
    if dataset.is_batched is None:
        return False  # Only its elements can tell, and a generator gives them once.
    try:
        return is_static(dataset.element_spec)
    except UnknownSpecError:
        return False  # It has no element, and so nothing to leave out.


def make_empty(piece: Element) -> Element:
    """Returns a batch of the same form without any example; a scalar becomes zero."""

    def empty(leaf: object) -> Element:
        if isinstance(leaf, bytes):
            return b""
        array = np.asarray(leaf)
        return array[:0] if array.ndim else np.zeros_like(array)

    return jax.tree.map(empty, piece)
