"""Data sets and iterators on a worker."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from distribax.data.adapt import as_dataset
from distribax.data.dataset import Dataset
from distribax.data.distributed import DistributedDataset, DistributedIterator
from distribax.data.iterator import DatasetIterator
from distribax.data.plan.order import Shuffle
from distribax.data.plan.plan_node import Node

ENDING = (DatasetIterator, DistributedIterator)
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
    return iter(dataset if isinstance(dataset, DistributedDataset) else as_dataset(dataset))
