"""Data sets and iterators on a worker."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from distribax.data.adapt import as_dataset
from distribax.data.dataset import Dataset
from distribax.data.distributed import DistributedDataset, DistributedIterator
from distribax.data.plan.order import Shuffle
from distribax.data.plan.plan_node import Node
from distribax.errors import OutOfRangeError
from distribax.execution import LiftedIterator


class WorkerIterator(LiftedIterator):
    """Gives the elements of a data set as they are, also inside `dx.function`."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._iterator = iter(dataset)

    @property
    def element_spec(self) -> Any:
        """The shapes and data types of the elements."""
        return self._dataset.element_spec

    def fetch(self) -> Any:
        """Returns the next element, outside of any trace."""
        try:
            return next(self._iterator)
        except StopIteration:
            raise OutOfRangeError("the worker's data set is at its end") from None

    def close(self) -> None:
        """Ends the iterator and the threads of its pipeline."""
        self._iterator.close()


ENDING = (WorkerIterator, DistributedIterator)
"""Iterators that have threads, which end with them."""


def own_dataset(dataset: Any) -> Any:
    """Returns a data set that came from the coordinator as this worker's own."""
    return Dataset(_reshuffled(dataset.plan, {})) if isinstance(dataset, Dataset) else dataset


def _reshuffled(node: Node, done: dict[int, Node]) -> Node:
    """Returns a plan whose shuffles without a seed have an order of this worker's own."""
    if id(node) not in done:
        made = node
        if node.inputs:
            made = node.with_inputs(tuple(_reshuffled(each, done) for each in node.inputs))
        if isinstance(made, Shuffle):
            made = dataclasses.replace(made, entropy=secrets.randbits(63))
        done[id(node)] = made
    return done[id(node)]


def made_dataset(made: Any) -> Any:
    """Returns what a data set function made, if it is a data set."""
    if made is None:
        raise ValueError(
            "create_per_worker_dataset: the function returned None. Return the data set."
        )
    return made if isinstance(made, DistributedDataset) else as_dataset(made)


def iterate(dataset: Any) -> Any:
    """Returns a new iterator, whose `next` works inside `dx.function`."""
    if isinstance(dataset, DistributedDataset):
        return iter(dataset)
    return WorkerIterator(as_dataset(dataset))
