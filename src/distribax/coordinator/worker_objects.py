"""What a worker keeps: functions, data sets, iterators and values, each made when first used."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, TypeAlias

from distribax.coordinator import iterators
from distribax.coordinator.interfaces import WorkerSetup
from distribax.coordinator.messages import Shipment
from distribax.coordinator.references import Kind, set_lookup

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class Stock:
    """The definitions that a worker has been sent, and the objects that it has made of them."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._shipments: dict[int, Shipment] = {}
        self._objects: dict[int, Any] = {}
        self._arguments: dict[bytes, Arguments] = {}
        set_lookup(self.get)

    def add(self, shipments: Iterable[Shipment]) -> None:
        """Keeps definitions; one that is there already stays as it is."""
        for shipment in shipments:
            self._shipments.setdefault(shipment.number, shipment)

    def remove(self, numbers: Iterable[int]) -> None:
        """Forgets definitions, and ends what runs for them."""
        for number in numbers:
            self._arguments.clear()
            self._shipments.pop(number, None)
            made = self._objects.pop(number, None)
            if isinstance(made, iterators.ENDING):
                made.close()

    def get(self, number: int) -> Any:
        """Returns the object of that number."""
        try:
            return self._objects[number]
        except KeyError:
            shipment = self._shipments[number]
            made = self._make(shipment)
            # What one function does to a value must not be seen by the next.
            if shipment.kind != Kind.VALUE.value:
                self._objects[number] = made
            return made

    def arguments(self, data: bytes | None) -> Arguments:
        """Returns the positional and the named arguments of a call."""
        if data is None:
            return (), {}
        known = self._arguments.get(data)
        if known is None:
            known = pickle.loads(data)
            # Most steps have only an iterator, which is the same object each time.
            if not known[1] and all(isinstance(arg, iterators.ENDING) for arg in known[0]):
                self._arguments[data] = known
        return known

    def _make(self, shipment: Shipment) -> Any:
        run = self._setup.run
        try:
            loaded = run(pickle.loads, (shipment.data,), {})
            match Kind(shipment.kind):
                case Kind.OBJECT | Kind.VALUE:
                    return loaded
                case Kind.DATASET:
                    return iterators.own_dataset(loaded)
                case Kind.DATASET_FUNCTION:
                    return iterators.made_dataset(run(loaded, (), {}))
                case Kind.ITERATOR:
                    return run(iterators.iterate, (loaded,), {})
        except Exception as error:
            error.add_note(f"This was while the worker made {shipment.name}.")
            raise
