"""What a worker keeps: functions, data sets, iterators and values, each made when first used."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from distribax.coordinator.messages import SentDefinition
from distribax.coordinator.references import DefinitionKind
from distribax.data.adapt import as_dataset
from distribax.data.dataset import Dataset
from distribax.data.distributed import DistributedDataset, DistributedIterator
from distribax.data.iterator import DatasetIterator
from distribax.data.plan.passes import renew_passes
from distribax.data.plan.plan_node import Node

_ITERATORS: Final = (DatasetIterator, DistributedIterator)

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class WorkerObjects:
    """The definitions that a worker has been sent, and the objects that it has made of them.

    Objects are made in the strategy's scope, by the caller of `get` or `load_arguments`.
    """

    def __init__(self) -> None:
        self._definitions: dict[int, SentDefinition] = {}
        self._objects: dict[int, Any] = {}

    def add(self, definitions: Iterable[SentDefinition]) -> None:
        """Keeps definitions; those that it has already stay as they are."""
        for definition in definitions:
            self._definitions.setdefault(definition.number, definition)

    def remove(self, numbers: Iterable[int]) -> None:
        """Forgets definitions, and ends the threads of their iterators."""
        for number in numbers:
            self._definitions.pop(number, None)
            made = self._objects.pop(number, None)
            if isinstance(made, _ITERATORS):
                made.close()

    def get(self, number: int) -> Any:
        """Returns the object of that number."""
        try:
            return self._objects[number]
        except KeyError:
            definition = self._definitions[number]
            made = _make_object(definition)
            # What one function does to a value must not be seen by the next.
            if definition.kind is not DefinitionKind.VALUE:
                self._objects[number] = made
            return made

    def load_arguments(self, data: bytes | None) -> Arguments:
        """Returns the positional and the keyword arguments of a call."""
        if data is None:
            return (), {}
        arguments: Arguments = pickle.loads(data)
        return arguments


def _make_object(definition: SentDefinition) -> object:
    try:
        loaded = pickle.loads(definition.data)
        match definition.kind:
            case DefinitionKind.OBJECT | DefinitionKind.VALUE:
                return loaded
            case DefinitionKind.DATASET:
                if isinstance(loaded, Dataset):
                    return Dataset(_reshuffle(loaded.plan, {}))
                return loaded
            case DefinitionKind.DATASET_FUNCTION:
                return _check_dataset(loaded())
            case DefinitionKind.ITERATOR:
                # `next` works inside `dx.function`, whatever the data set is.
                return iter(_check_dataset(loaded))
    except Exception as error:
        error.add_note(f"This was while the worker made {definition.name}.")
        raise


def _check_dataset(made: object) -> Dataset | DistributedDataset:
    """Returns what a function returned as a data set; raises if it is none."""
    if made is None:
        raise ValueError(
            "create_per_worker_dataset: the function returned None. Return the data set."
        )
    return made if isinstance(made, DistributedDataset) else as_dataset(made)


def _reshuffle(node: Node, done: dict[int, Node]) -> Node:
    """Returns a plan whose shuffles without a seed have an order of this worker's own."""
    if id(node) not in done:
        made = node
        if node.inputs:
            made = node.with_inputs(tuple(_reshuffle(each, done) for each in node.inputs))
        done[id(node)] = renew_passes(made)
    return done[id(node)]
